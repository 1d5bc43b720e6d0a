"""Samples of several corpora in the ratio of their weights.

Sample number i belongs to the corpus whose turn it is (``interleave.py``), and is that corpus's
next sample in its own order, which
goes through its own epochs: a small corpus with a great weight is seen more often. All of it
follows from the seed and i."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from lightning_ptdp.base.option_types import Size, check_arguments
from lightning_ptdp.base.random import derive_seed
from lightning_ptdp.data.interleave import Turns
from lightning_ptdp.data.sample_permutation import sample_order
from lightning_ptdp.data.stream import PADDING, SampleStream

__all__ = ["MixtureStream"]


class MixtureStream(SampleStream):
    """Several streams as one.

    An epoch is as many samples as all streams hold together; with ``repeat=False``, for evaluation,
    the first samples of each, as many as there are before one of them runs out.

    Args:
        streams: Of the same kind and sequence length, with the same token ids.
        weights: One for each, in any unit.
        repeat: Go through a stream again and again.
        max_samples: Use the first so many samples of the mixture only.

    Raises:
        ValueError: The weights are not positive, there are not as many as streams, or a sequence
            length differs.
    """

    def __init__(
        self,
        streams: Sequence[SampleStream],
        weights: Sequence[float],
        *,
        repeat: bool = True,
        max_samples: Size | None = None,
    ) -> None:
        check_arguments(MixtureStream.__init__, locals())
        if len(streams) != len(weights) or not streams:
            raise ValueError(
                f"{len(streams)} streams and {len(weights)} weights: give every stream its weight"
            )
        lengths = sorted({stream.sequence_length for stream in streams})
        if len(lengths) > 1:
            raise ValueError(f"the streams have sequence_length {lengths}: they must agree")
        self.streams = tuple(streams)
        self.turns = Turns.of(weights)
        parts = [*(stream.fingerprint for stream in streams), repr(self.turns.counts)]
        sizes = [len(stream) for stream in streams]
        super().__init__(
            samples=sum(sizes) if repeat else self.turns.prefix(sizes),
            sequence_length=lengths[0],
            max_samples=max_samples,
            fingerprint=hashlib.sha256("\n".join(parts).encode()).hexdigest(),
        )
        self._again = not repeat or max_samples is not None

    def visits(self, numbers: np.ndarray, *, seed: int, shuffle: bool) -> np.ndarray:
        """Visits in the order of training: those of the streams, times the number of streams, plus
        the stream."""
        if self._again:
            numbers = sample_order(numbers, size=self._size, seed=seed, shuffle=shuffle)
        corpora, ranks = self.turns.at(numbers)
        visits = np.empty_like(numbers)
        for corpus, stream in enumerate(self.streams):
            here = corpora == corpus
            own = stream.visits(
                ranks[here], seed=derive_seed(seed, "corpus", corpus), shuffle=shuffle
            )
            visits[here] = own * len(self.streams) + corpus
        return visits

    def __getitems__(self, visits: Sequence[int]) -> np.ndarray:
        """Rows of samples (b, ...); rows of ``PADDING`` for that visit."""
        asked = np.array(visits, np.int64)
        padding = asked == PADDING
        own, corpora = np.divmod(np.where(padding, 0, asked), len(self.streams))
        own[padding] = PADDING
        parts = [(corpora == corpus, stream) for corpus, stream in enumerate(self.streams)]
        read = [
            (here, stream.__getitems__(own[here].tolist())) for here, stream in parts if here.any()
        ]
        rows = np.empty((len(asked), *read[0][1].shape[1:]), read[0][1].dtype)
        for here, found in read:
            rows[here] = found
        return rows

    def as_batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """The batch that rows are made into, by the streams."""
        return self.streams[0].as_batch(rows)
