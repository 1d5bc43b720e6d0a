"""Division of a corpus into training and validation.

The content of the documents decides, so the division is the same in every run and on every machine.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_ptdp.data.corpus import Document
from lightning_ptdp.data.data_error import CorpusError

_AT_ONCE = 1 << 16  # documents whose numbers exist as Python objects at the same time
_LINE_SEARCH = 1000  # characters before a cut in which it looks for the start of a line


@dataclass(frozen=True, kw_only=True)
class Split:
    """A division of documents without overlap.

    Attributes:
        seed: Seed of the documents' scores.
        whole: Scores of the documents used for validation.
        cut: Score of a document whose tail is used for validation; None if no document is cut.
        tail: Fraction of the characters of that document in its tail.
    """

    seed: int
    whole: frozenset[int]
    cut: int | None = None
    tail: float = 0.0

    def parts(self, document: Document) -> tuple[str, str]:
        """Return the text of the document for (training, validation).

        One of them is empty unless the document is the one that is cut.
        """
        document_score = score(document.text, self.seed)
        if document_score in self.whole:
            return "", document.text
        if document_score != self.cut:
            return document.text, ""
        text = document.text
        position = min(max(round(len(text) * (1 - self.tail)), 1), len(text) - 1)
        position = text.rfind("\n", max(position - _LINE_SEARCH, 0), position) + 1 or position
        return text[:position], text[position:]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Result of one pass over the corpus.

    Attributes:
        documents: Number of documents.
        characters: Total length of the documents.
        digest: sha256 over the names and the hashes of the contents.
        undecodable: Names of the texts that are not UTF-8.
        split: Division into training and validation.
    """

    documents: int
    characters: int
    digest: str
    undecodable: list[str]
    split: Split

    def to_json(self) -> dict[str, Any]:
        """Return the survey in JSON's types."""
        return {**vars(self), "split": {**vars(self.split), "whole": sorted(self.split.whole)}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Survey:
        """Return the survey from the values that ``to_json`` returned."""
        split = Split(**{**values["split"], "whole": frozenset(values["split"]["whole"])})
        return cls(**{**values, "split": split})


@dataclass(frozen=True, kw_only=True)
class Scan:
    """Compact data about some consecutive documents, for the survey.

    Attributes:
        scores: One score per document, uint64.
        sizes: Characters of each document, uint64.
        listing: Names and hashes of the contents.
        undecodable: Names of the texts that are not UTF-8.
    """

    scores: array[int]
    sizes: array[int]
    listing: bytes
    undecodable: list[str]


def scan(documents: Iterable[Document], *, seed: int, undecodable: list[str]) -> Scan:
    """Read every document once; ``undecodable`` is filled by the reader meanwhile."""
    scores = array("Q")
    sizes = array("Q")
    listing = []
    for document in documents:
        scores.append(score(document.text, seed))
        sizes.append(len(document.text))
        listing.append(f"{document.name}\0{scores[-1]:016x}\n")
    return Scan(
        scores=scores,
        sizes=sizes,
        listing="".join(listing).encode("utf-8", "surrogateescape"),
        undecodable=undecodable,
    )


def survey(scans: Iterable[Scan], *, validation_fraction: float, seed: int) -> Survey:
    """Divide the documents of the scans, which together cover the corpus in order.

    Whole documents go to validation in the order of a seeded hash of their content, as long as they
    fit into the fraction (counted in characters; equal documents stay together). If that yields
    less than half of the requested fraction, as with few big documents or only one, the tail of the
    biggest document goes to validation too.

    Raises:
        CorpusError: There is no text, or not enough to divide.
    """
    scores = array("Q")
    sizes = array("Q")
    digest = hashlib.sha256()
    undecodable = []
    for part in scans:
        undecodable += part.undecodable
        scores.extend(part.scores)
        sizes.extend(part.sizes)
        digest.update(part.listing)
    if not scores:
        raise CorpusError("the source has no text")
    distinct, weights = _byscore(np.frombuffer(scores, np.uint64), np.frombuffer(sizes, np.uint64))
    split = _divide(distinct, weights, validation_fraction, seed)
    return Survey(
        documents=len(scores),
        characters=int(weights.sum()),
        digest=digest.hexdigest(),
        undecodable=undecodable,
        split=split,
    )


def _byscore(scores: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct scores, ascending, and the number of characters of each."""
    order = np.argsort(scores, kind="stable")
    scores = scores[order]
    firsts = np.flatnonzero(np.append(True, scores[1:] != scores[:-1]))
    return scores[firsts], np.add.reduceat(sizes[order], firsts)


def _divide(scores: np.ndarray, sizes: np.ndarray, fraction: float, seed: int) -> Split:
    target = fraction * int(sizes.sum())
    chosen = set()
    taken = 0
    for start in range(0, len(scores), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        for score, size in zip(scores[part].tolist(), sizes[part].tolist(), strict=True):
            if taken + size <= target:
                chosen.add(score)
                taken += size
    if taken >= target / 2:
        return Split(seed=seed, whole=frozenset(chosen))
    biggest = int(sizes.argmax())
    assert int(scores[biggest]) not in chosen, (
        "documents below half the target always fill half the target"
    )
    if sizes[biggest] < 2:
        raise CorpusError(
            f"the source has {int(sizes.sum())} characters, too few to split into training and "
            "validation"
        )
    tail = (target - taken) / float(sizes[biggest])
    return Split(seed=seed, whole=frozenset(chosen), cut=int(scores[biggest]), tail=tail)


def score(text: str, seed: int) -> int:
    """Return a seeded hash of a text, 64 bits."""
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8, key=seed.to_bytes(8, "big")).digest(), "big"
    )
