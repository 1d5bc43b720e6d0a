"""Which text is for training and which for validation: decided by content, the same in every run
and on every machine."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_ptdp.data.corpus import Document
from lightning_ptdp.data.data_error import CorpusError

__all__ = ["Scan", "Split", "Survey", "scan", "survey"]

_AT_ONCE = 1 << 16  # documents whose numbers are Python objects at the same time
_LINE_SEARCH = 1000  # how far back a cut looks for the start of a line, in characters


@dataclass(frozen=True, kw_only=True)
class Split:
    """A division of documents that never overlaps.

    Attributes:
        seed: Of the documents' scores.
        whole: Scores of the documents that are for validation.
        cut: Score of a document whose tail is for validation; None if no document is cut.
        tail: Which part of the characters of that document is its tail.
    """

    seed: int
    whole: frozenset[int]
    cut: int | None = None
    tail: float = 0.0

    def parts(self, document: Document) -> tuple[str, str]:
        """The document's text for (training, validation); one of them is empty unless the document
        is the one cut."""
        score = _score(document.text, self.seed)
        if score in self.whole:
            return "", document.text
        if score != self.cut:
            return document.text, ""
        text = document.text
        place = min(max(round(len(text) * (1 - self.tail)), 1), len(text) - 1)
        place = text.rfind("\n", max(place - _LINE_SEARCH, 0), place) + 1 or place
        return text[:place], text[place:]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Result of one pass over the corpus: counts, a hash of all names and contents, and the split.

    Attributes:
        documents: Number of documents.
        characters: Their total length.
        digest: sha256 over the names and the contents' hashes.
        split: The division.
    """

    documents: int
    characters: int
    digest: str
    split: Split

    def to_json(self) -> dict[str, Any]:
        """In JSON's types."""
        split = {
            "seed": self.split.seed,
            "whole": sorted(self.split.whole),
            "cut": self.split.cut,
            "tail": self.split.tail,
        }
        return {
            "documents": self.documents,
            "characters": self.characters,
            "digest": self.digest,
            "split": split,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Survey:
        """Return the survey from the values that ``to_json`` returned."""
        split = Split(**{**values["split"], "whole": frozenset(values["split"]["whole"])})
        return cls(**{**values, "split": split})


@dataclass(frozen=True, kw_only=True)
class Scan:
    """Data about some consecutive documents for the survey, in little memory.

    Attributes:
        scores: One a document, uint64.
        sizes: Characters of each, uint64.
        listing: Names and hashes of the contents.
    """

    scores: array[int]
    sizes: array[int]
    listing: bytes


def scan(documents: Iterable[Document], *, seed: int) -> Scan:
    """Read every document once."""
    scores, sizes = array("Q"), array("Q")
    listing = []
    for document in documents:
        scores.append(_score(document.text, seed))
        sizes.append(len(document.text))
        listing.append(f"{document.name}\0{scores[-1]:016x}\n")
    return Scan(
        scores=scores, sizes=sizes, listing="".join(listing).encode("utf-8", "surrogateescape")
    )


def survey(scans: Iterable[Scan], *, validation_fraction: float, seed: int) -> Survey:
    """Divide the documents of the scans, together all of the corpus in its order.

    Whole documents go to validation in the order of a seeded hash of their content, as long as they
    fit into the fraction (counted in characters; equal documents stay together). Where that yields
    less than half of what was asked for, as with a few big documents or only one, the biggest
    document gives its tail.

    Raises:
        CorpusError: There is no text, or not enough to divide.
    """
    scores, sizes = array("Q"), array("Q")
    digest = hashlib.sha256()
    for part in scans:
        scores.extend(part.scores)
        sizes.extend(part.sizes)
        digest.update(part.listing)
    if not scores:
        raise CorpusError("the source holds no text at all")
    distinct, weights = _by_score(np.frombuffer(scores, np.uint64), np.frombuffer(sizes, np.uint64))
    split = _divide(distinct, weights, validation_fraction, seed)
    return Survey(
        documents=len(scores), characters=int(weights.sum()), digest=digest.hexdigest(), split=split
    )


def _by_score(scores: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Different scores, ascending, and how many characters each stands for."""
    order = np.argsort(scores, kind="stable")
    scores = scores[order]
    firsts = np.flatnonzero(np.append(True, scores[1:] != scores[:-1]))
    return scores[firsts], np.add.reduceat(sizes[order], firsts)


def _divide(scores: np.ndarray, sizes: np.ndarray, fraction: float, seed: int) -> Split:
    target = fraction * int(sizes.sum())
    whole, taken = set(), 0
    for start in range(0, len(scores), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        for score, size in zip(scores[part].tolist(), sizes[part].tolist(), strict=True):
            if taken + size <= target:
                whole.add(score)
                taken += size
    if taken >= target / 2:
        return Split(seed=seed, whole=frozenset(whole))
    biggest = int(sizes.argmax())
    assert int(scores[biggest]) not in whole, (
        "documents below half the target always fill half the target"
    )
    if sizes[biggest] < 2:
        raise CorpusError(
            f"the source holds {int(sizes.sum())} characters, too little to divide into training "
            "and validation"
        )
    tail = (target - taken) / float(sizes[biggest])
    return Split(seed=seed, whole=frozenset(whole), cut=int(scores[biggest]), tail=tail)


def _score(text: str, seed: int) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8, key=seed.to_bytes(8, "big")).digest(), "big"
    )
