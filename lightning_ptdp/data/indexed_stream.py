"""Random access to the token blocks of Megatron's indexed files.

The documents of one split are joined and cut into blocks.

::

    PREFIX.bin   d0 d0 d0 | d1 d1 | d2 d2 d2 | d3 d3        validation = {d1}
    train        d0 d0 d0   d2 d2 d2 d3 d3                  two runs
    blocks       [d0 d0 d0 d2] [d2 d2 d3 d3]                sequence_length = 3

Blocks do not overlap, as in ``stream.py``. The last tokens, which do not fill a block, are left
out. A run takes 16 bytes of memory.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np

from lightning_ptdp.base.option_types import Count, Size, check_arguments
from lightning_ptdp.data.data_error import StoreError
from lightning_ptdp.data.indexed import IndexedFile
from lightning_ptdp.data.number_checks import check_fraction
from lightning_ptdp.data.sample_permutation import sample_order
from lightning_ptdp.data.stream import BlockStream

__all__ = ["IndexedStream"]


class IndexedStream(BlockStream):
    """Random access to the blocks of one split.

    Args:
        prefix: Path of the files without ``.bin`` and ``.idx``.
        split: ``"train"``, ``"validation"``, or ``"all"`` for every document.
        sequence_length: s, tokens of a sample.
        vocabulary_size: Number of ids; every token that is read is checked against it.
        validation_fraction: Fraction of the tokens used for validation: whole documents, in an
            order drawn from ``split_seed``.
        split_seed: Seed of that order.
        max_samples: Use only this many blocks, from the first on.

    Raises:
        StoreError: The files are damaged or hold other data (``IndexedFile``), or the split holds
            no block of this length. While reading: a token is outside the vocabulary.
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        split: Literal["train", "validation", "all"] = "train",
        sequence_length: Size,
        vocabulary_size: Size,
        validation_fraction: float = 0.03,
        split_seed: Count = 0,
        max_samples: Size | None = None,
    ) -> None:
        check_arguments(IndexedStream.__init__, locals())
        check_fraction("validation_fraction", validation_fraction)
        self.vocabulary_size = vocabulary_size
        self._file = file = IndexedFile(prefix)
        chosen = np.ones(file.documents, bool)
        if split != "all":
            validation = _validation_documents(file, validation_fraction, split_seed)
            chosen = validation if split == "validation" else ~validation
        self._starts, lengths = _runs(file.boundaries, chosen)
        self._ends = np.cumsum(lengths)
        tokens = int(self._ends[-1]) if len(self._ends) else 0
        blocks = tokens // (sequence_length + 1)
        if not blocks:
            raise StoreError(
                f"{prefix}: no {split} sample of sequence_length={sequence_length} (+ 1 label) in "
                f"{tokens} tokens: use "
                f"sequence_length <= {max(tokens - 1, 0)}, more data"
                + (", or a bigger validation_fraction" if split == "validation" else "")
            )
        division = "all" if split == "all" else f"{split} {validation_fraction!r} {split_seed}"
        super().__init__(
            samples=blocks,
            sequence_length=sequence_length,
            max_samples=max_samples,
            fingerprint=hashlib.sha256(f"{file.fingerprint()} {division}".encode()).hexdigest(),
        )

    def _read(self, index: int) -> np.ndarray:
        file, length = self._file, self.sequence_length + 1
        place, stop = index * length, (index + 1) * length
        parts = []
        run = int(np.searchsorted(self._ends, place, side="right"))
        while place < stop:
            behind = int(self._ends[run])
            # Counted from the first token of the run, self._starts[run].
            before = int(self._ends[run - 1]) if run else 0
            start = int(self._starts[run]) + place - before
            part = file.tokens[start : start + min(behind, stop) - place]
            file.check_some(part, start, self.vocabulary_size)
            parts.append(part)
            place, run = min(behind, stop), run + 1
        return np.concatenate(parts)


def _validation_documents(file: IndexedFile, fraction: float, seed: int) -> np.ndarray:
    """Return a mask of the validation documents.

    Documents are taken in a drawn order, as many as come nearest to the fraction of the tokens, but
    at least one.
    """
    lengths = np.diff(file.boundaries)
    filled = np.flatnonzero(lengths)
    if len(filled) < 2:
        raise StoreError(
            f"{file.prefix} holds {len(filled)} document with tokens, which cannot be divided: "
            "give a file of its own for validation "
            "(validation_prefix)"
        )
    order = filled[sample_order(np.arange(len(filled)), size=len(filled), seed=seed)]
    taken = np.cumsum(lengths[order])
    count = int(np.abs(taken - fraction * taken[-1]).argmin()) + 1
    chosen = np.zeros(len(lengths), bool)
    chosen[order[: min(count, len(order) - 1)]] = True
    return chosen


def _runs(boundaries: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (first token, number of tokens), int64, of the contiguous runs of chosen documents."""
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    starts, ends = boundaries[edges[::2]], boundaries[edges[1::2]]
    return starts, ends - starts
