"""Which text is for training and which for validation: decided by content, the same in every run and on every machine."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lightning_ptdp.data.corpus import Document
from lightning_ptdp.data.errors import CorpusError

__all__ = ["Split", "Survey", "survey"]

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
        """The document's text for (training, validation); one of them is empty unless the document is the one cut."""
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
    """What one pass over the corpus found: counts, a hash of all names and contents, and the split.

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


def survey(documents: Iterable[Document], *, validation_fraction: float, seed: int) -> Survey:
    """Read every document once and divide them.

    Whole documents go to validation in the order of a seeded hash of their content, as long as they fit into the fraction
    (counted in characters; equal documents stay together). Where that yields less than half of what was asked for, as with a few
    big documents or only one, the biggest document gives its tail.

    Raises:
        CorpusError: There is no text, or not enough to divide.
    """
    scores, sizes = array("Q"), array("Q")
    digest = hashlib.sha256()
    for document in documents:
        scores.append(_score(document.text, seed))
        sizes.append(len(document.text))
        digest.update(f"{document.name}\0{scores[-1]:016x}\n".encode("utf-8", "surrogateescape"))
    if not scores:
        raise CorpusError("the source holds no text at all")
    distinct, places = np.unique(np.frombuffer(scores, np.uint64), return_inverse=True)
    weights = np.bincount(places, np.frombuffer(sizes, np.uint64).astype(np.float64))
    split = _divide(distinct, weights, validation_fraction, seed)
    return Survey(documents=len(scores), characters=sum(sizes), digest=digest.hexdigest(), split=split)


def _divide(scores: np.ndarray, sizes: np.ndarray, fraction: float, seed: int) -> Split:
    target = fraction * sizes.sum()
    whole, taken = set(), 0.0
    for score, size in zip(scores.tolist(), sizes.tolist(), strict=True):
        if taken + size <= target:
            whole.add(score)
            taken += size
    if taken >= target / 2:
        return Split(seed=seed, whole=frozenset(whole))
    biggest = int(sizes.argmax())
    assert int(scores[biggest]) not in whole, "documents below half the target always fill half the target"
    if sizes[biggest] < 2:
        raise CorpusError(f"the source holds {int(sizes.sum())} characters, too little to divide into training and validation")
    tail = (target - taken) / float(sizes[biggest])
    return Split(seed=seed, whole=frozenset(whole), cut=int(scores[biggest]), tail=tail)


def _score(text: str, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, key=seed.to_bytes(8, "big")).digest(), "big")
