"""Random access to samples of several corpora in the ratio of their weights.

Sample number i belongs to the corpus whose turn it is (``interleave.py``). It is the next sample of
that corpus in the corpus's own order and epochs: a small corpus with a large weight is repeated
more often. The seed and i determine the sample.
"""

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

    An epoch has as many samples as all streams hold together. With ``repeat=False``, for
    evaluation, it has the first samples of each stream, up to the point where one of them runs out.

    Args:
        streams: Streams of the same kind and sequence length, with the same token ids.
        weights: One weight per stream, in any unit.
        repeat: Go through each stream repeatedly.
        max_samples: Use only this many samples of the mixture, from the first on.

    Raises:
        ValueError: The weights are not positive, their number is not that of the streams, or a
            sequence length differs.
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
                f"there are {len(streams)} streams, but {len(weights)} weights. Give one "
                "weight per stream"
            )
        lengths = sorted({stream.sequence_length for stream in streams})
        if len(lengths) > 1:
            raise ValueError(
                f"the streams have sequence_length {lengths}, but all must have the same"
            )
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
        """Return visits in the order of training.

        The visit of a stream is encoded as ``visit * len(self.streams) + stream``.
        """
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
        """Return rows of samples (b, ...); a visit of ``PADDING`` gives a padding row."""
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
        """Return the batch that the streams make of rows."""
        return self.streams[0].as_batch(rows)
