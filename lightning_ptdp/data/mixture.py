"""Samples of several prepared folders in the ratio of their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, TypedDict

import numpy as np

from lightning_ptdp.base.option_types import Size, check_arguments
from lightning_ptdp.base.random import derive_seed
from lightning_ptdp.checkpoint.files import sha256
from lightning_ptdp.data.data_error import StoreError
from lightning_ptdp.data.huggingface_tokenizer import AnyTokenizer, load_tokenizer
from lightning_ptdp.data.manifest import SplitName, verify_store
from lightning_ptdp.data.stream import Batch, SampleStream, TokenStream, sample_order
from lightning_ptdp.data.stream_datamodule import StreamDataModule


class CorpusOptions(TypedDict):
    """One corpus of a mixture.

    A plain mapping, because checkpoints and YAML files contain it.
    """

    data_dir: str
    """Folder that ``prepare`` made."""
    weight: float
    """Share of the samples, in any unit."""


class MixtureDataModule(StreamDataModule):
    """Batches of several corpora, mixed in the ratio of their weights.

    Each corpus has its own order and its own epochs. In the first n samples, each corpus has its
    share of n to within one sample, for every n and in any layout. An epoch has as many samples as
    all corpora hold together. Validation takes the validation samples of each corpus once, in the
    same ratio, until one corpus has no more; the loss is that of the mixture.

    All folders need the same tokenizer: prepare the first, then the rest with ``tokenizer_dir`` set
    to the first.

    Args:
        corpora: List of folders and their weights, such as ``[{"data_dir": "web", "weight": 0.7},
            {"data_dir": "code", "weight": 0.3}]``.
        vocabulary_size: Number of ids of their tokenizer.
        verify_hashes: Compare the hash of every file before training, not only its size.
        kwargs: Arguments of ``StreamDataModule``: sequence_length, batch sizes, seed.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    def __init__(
        self,
        *,
        corpora: list[CorpusOptions],
        vocabulary_size: Size = 8192,
        verify_hashes: bool = True,
        **kwargs: Any,
    ) -> None:
        check_arguments(MixtureDataModule.__init__, locals())
        super().__init__(**kwargs)
        self.save_hyperparameters()
        if not corpora:
            raise ValueError(
                f"corpora={corpora!r} is empty. Give a list of "
                f"{{{', '.join(CorpusOptions.__annotations__)}}}"
            )
        Turns.of([corpus["weight"] for corpus in corpora])
        self.corpora = corpora
        self.vocabulary_size = vocabulary_size
        self.verify_hashes = verify_hashes

    @cached_property
    def tokenizer(self) -> AnyTokenizer:
        """Tokenizer of all folders."""
        return load_tokenizer(self.corpora[0]["data_dir"])

    def check(self, *, num_replicas: int = 1) -> None:
        """Check as ``StreamDataModule.check``, and check files and tokenizers of the folders."""
        self._verify(hashes=self.verify_hashes)
        super().check(num_replicas=num_replicas)

    def prepare_data(self) -> None:
        """Check the files; Lightning calls this in one process per node.

        Raises:
            StoreError: A folder is not prepared, is damaged, or has another tokenizer.
        """
        self._verify(hashes=self.verify_hashes)

    def setup(self, stage: str | None = None) -> None:
        """Check sizes and tokenizers in every process.

        Raises:
            StoreError: As for ``prepare_data``.
        """
        self._verify(hashes=False)

    def _verify(self, *, hashes: bool) -> None:
        first, *folders = self._places()
        expected = verify_store(
            first, hashes=hashes, vocabulary_size=self.vocabulary_size
        ).tokenizer_fingerprint
        for folder in folders:
            actual = verify_store(folder, hashes=hashes).tokenizer_fingerprint
            if actual != expected:
                raise StoreError(
                    f"{folder} has tokenizer {actual[:12]}, but {first} has {expected[:12]}, and a "
                    f"mixture needs the same one. Prepare {folder} again with tokenizer_dir={first}"
                )

    def _places(self) -> list[str]:
        return [corpus["data_dir"] for corpus in self.corpora]

    def _stream(self, split: SplitName, max_samples: int | None = None) -> SampleStream:
        streams = [
            TokenStream(corpus["data_dir"], split=split, sequence_length=self.sequence_length)
            for corpus in self.corpora
        ]
        weights = [corpus["weight"] for corpus in self.corpora]
        return MixtureStream(streams, weights, repeat=split == "train", max_samples=max_samples)


# ---- Random access to the samples of a mixture ---------------------------------------------------
#
# Sample number i belongs to the corpus whose turn it is. It is the next sample of that corpus in
# the corpus's own order and epochs: a small corpus with a large weight is repeated more often. The
# seed and i determine the sample.


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
            fingerprint=sha256("\n".join(parts).encode()),
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
            mask = corpora == corpus
            stream_visits = stream.visits(
                ranks[mask], seed=derive_seed(seed, "corpus", corpus), shuffle=shuffle
            )
            visits[mask] = stream_visits * len(self.streams) + corpus
        return visits

    def __getitems__(self, visits: Sequence[int]) -> np.ndarray:
        """Return rows of samples (b, ...); a visit of ``PADDING`` gives a padding row."""
        # The quotient of PADDING, -1, is PADDING too: the last stream returns the padding row.
        stream_visits, corpora = np.divmod(np.array(visits, np.int64), len(self.streams))
        results = [
            (mask, stream.__getitems__(stream_visits[mask].tolist()))
            for corpus, stream in enumerate(self.streams)
            if (mask := corpora == corpus).any()
        ]
        rows = np.empty((len(visits), *results[0][1].shape[1:]), results[0][1].dtype)
        for mask, samples in results:
            rows[mask] = samples
        return rows

    def as_batch(self, rows: np.ndarray) -> Batch:
        """Return the batch that the streams make of rows."""
        return self.streams[0].as_batch(rows)


# ---- The order in which several corpora supply samples -------------------------------------------
#
# Every prefix of the order holds each corpus in its share. The turns repeat with a period of D, in
# which corpus c has m_c turns. With ``weights = 0.5, 0.3, 0.2``::
#
#     turns   0 1 0 2 0 1 0 2 1 0 | 0 1 0 2 ...           D = 10, m = 5, 3, 2
#
# After any number n of turns, corpus c has had between n m_c / D - 1 and n m_c / D + 1 of them.
# This is the chairman assignment (Tijdeman, "The chairman assignment problem", Discrete Mathematics
# 32, 1980), the closest assignment that exists for any weights.


_LONGEST = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The endless sequence of turns.

    Attributes:
        counts: m_c, turns of each corpus in a period.
        order: int64 (D,); the corpus of each turn.
        ranks: int64 (D,); the number of earlier turns of that corpus in the period.
    """

    counts: tuple[int, ...]
    order: np.ndarray
    ranks: np.ndarray

    @classmethod
    def of(cls, weights: Sequence[float]) -> Turns:
        """Create turns in the ratio of the weights, which need not add up to 1.

        The ratio is exact for weights whose ratios are fractions with a denominator of at most
        65,536, such as decimals of four digits. Otherwise it is within 1 / 65,536.

        Raises:
            ValueError: A weight is not a positive number, or is so small that its corpus would
                never be read.
        """
        for weight in weights:
            if (
                isinstance(weight, bool)
                or not isinstance(weight, int | float)
                or not 0 < weight < math.inf
            ):
                raise ValueError(f"weight={weight!r} must be a number greater than 0")
        counts = _counts([Fraction(str(weight)) for weight in weights])
        if min(counts) < 1:
            small = weights[counts.index(0)]
            raise ValueError(
                f"weight={small!r} is less than one sample in {_LONGEST}. Leave this corpus "
                "out, or increase its weight"
            )
        order = _assign(counts)
        ranks = np.empty_like(order)
        for corpus, count in enumerate(counts):
            ranks[order == corpus] = np.arange(count)
        return cls(counts=counts, order=order, ranks=ranks)

    def at(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus of each turn, and the number of its earlier turns.

        Both are int64 arrays of the shape of ``numbers``.
        """
        periods, positions = np.divmod(numbers, len(self.order))
        corpora = self.order[positions]
        return corpora, periods * np.array(self.counts)[corpora] + self.ranks[positions]

    def prefix(self, sizes: Sequence[int]) -> int:
        """Return the largest number of turns in which no corpus exceeds its size."""
        last = []
        for corpus, (count, size) in enumerate(zip(self.counts, sizes, strict=True)):
            periods, rank = divmod(size, count)
            # The first turn that exceeds the size.
            last.append(periods * len(self.order) + int(np.flatnonzero(self.order == corpus)[rank]))
        return min(last)


def _counts(weights: list[Fraction]) -> tuple[int, ...]:
    """Return the turns of each corpus in a period.

    These are the ratios of the weights in lowest terms, or the nearest ones with the longest
    period.
    """
    shares = [weight / sum(weights) for weight in weights]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= _LONGEST:
        return tuple(int(share * period) for share in shares)
    counts = [int(share * _LONGEST) for share in shares]
    by_deficit = sorted(
        range(len(shares)), key=lambda corpus: counts[corpus] - shares[corpus] * _LONGEST
    )
    for corpus in by_deficit[: _LONGEST - sum(counts)]:
        counts[corpus] += 1
    return tuple(counts)


def _assign(counts: tuple[int, ...]) -> np.ndarray:
    """Apply Tijdeman's rule, in integers.

    Of the corpora that are behind by 1 / (2k - 2) or more, the one that can wait the least is next.
    """
    period = sum(counts)
    num_corpora = len(counts)
    order = np.zeros(period, np.int64)
    if num_corpora == 1:
        return order
    # All values are in units of 1 / (D (2k - 2)).
    scale = 2 * num_corpora - 2
    share = np.array(counts, np.int64) * scale
    owed = np.zeros(num_corpora, np.int64)
    limit = period * (scale - 1)
    for turn in range(period):
        owed += share
        # Turns until a corpus is too far behind; corpora that have had their share can wait.
        patience = np.where(owed >= period, (limit - owed) / share, np.inf)
        chosen = int(patience.argmin())
        order[turn] = chosen
        owed[chosen] -= period * scale
    return order
