"""Streams of samples by number, their order, and the token blocks of a prepared split.

A block has ``sequence_length + 1`` consecutive tokens, and blocks do not overlap. Inputs are all
but the last token, labels all but the first. Every input therefore has its label, and one token in
``sequence_length + 1`` is a label only. Documents are joined, each followed by its end token; a
block may hold parts of several. The last tokens of a chunk, which do not fill a block, are left
out.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_ptdp.base.nested import IMAGE_FIELDS
from lightning_ptdp.base.option_types import Size, check_arguments
from lightning_ptdp.data.data_error import StoreError
from lightning_ptdp.data.manifest import Manifest, SplitName
from lightning_ptdp.data.token_store import ChunkMap

Batch: TypeAlias = dict[str, torch.Tensor]

IGNORE_INDEX = -100
"""Label that losses ignore (the default of ``torch.nn.functional.cross_entropy``)."""

PADDING = -1
"""Sample number of a row that only fills up a batch: input ids 0, labels ``IGNORE_INDEX``."""


class SampleStream(Dataset[Batch]):
    """Samples by number, as the loaders read them.

    Subclasses define the rows (``__getitems__``, ``as_batch``). A visit identifies a sample and the
    time of reading, because a sample may differ between epochs. It is usually ``epoch * len(stream)
    + sample``.

    Args:
        samples: Number of samples.
        sequence_length: s, tokens of a sample.
        max_samples: Use only this many samples, from the first on.
        fingerprint: Text that is equal for equal samples.
    """

    def __init__(
        self, *, samples: int, sequence_length: int, max_samples: int | None, fingerprint: str
    ) -> None:
        self.sequence_length = sequence_length
        self.fingerprint = fingerprint
        self._size = samples if max_samples is None else min(samples, max_samples)

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        return self._size

    def __getitem__(self, index: int) -> Batch:
        """Return one sample of the first epoch, in the stored order."""
        if not 0 <= index < self._size:
            raise IndexError(f"sample {index} of {self._size}")
        rows = self.__getitems__(self.visits(np.array([index]), seed=0, shuffle=False).tolist())
        return {
            name: tensor if name in IMAGE_FIELDS else tensor[0]
            for name, tensor in self.as_batch(rows).items()
        }

    def visits(self, numbers: np.ndarray, *, seed: int, shuffle: bool) -> np.ndarray:
        """Return the visits of sample numbers, which are counted over all epochs.

        The result is int64 of the same shape.
        """
        samples = sample_order(numbers, size=self._size, seed=seed, shuffle=shuffle)
        return numbers // self._size * self._size + samples

    def numbers(self, visits: Sequence[int]) -> list[int]:
        """Return the sample of each visit, or ``PADDING``."""
        return [visit if visit == PADDING else visit % self._size for visit in visits]

    @abstractmethod
    def __getitems__(self, visits: Sequence[int]) -> Any:
        """Return rows of samples (b, ...), given visits or ``PADDING``.

        Worker processes send the rows in this form.
        """

    @abstractmethod
    def as_batch(self, rows: Any) -> Batch:
        """Return the batch made of rows."""


class BlockStream(SampleStream):
    """Blocks of s + 1 tokens, the same in every epoch.

    Args:
        tokens: Tokens in blocks of s + 1.
        split: Name of the split, for messages.
        where: Name of the data, for messages.
        sequence_length: s, tokens of a sample.
        max_samples: Use only this many blocks, from the first on.
        fingerprint: Text that is equal for equal samples.

    Raises:
        StoreError: The split holds no block of this length.
    """

    def __init__(
        self,
        tokens: ChunkMap,
        *,
        split: str,
        where: str | Path,
        sequence_length: int,
        max_samples: int | None,
        fingerprint: str,
    ) -> None:
        self._tokens = tokens
        if not len(tokens):
            sizes = [chunk.tokens for chunk in tokens.chunks]
            longest = max(sizes, default=0)
            raise StoreError(
                f"{where}: no {split} sample of sequence_length={sequence_length} (+ 1 label) "
                f"fits, because the split has {sum(sizes)} tokens in chunks of at most "
                f"{longest}. Use sequence_length <= {max(longest - 1, 0)}, more data"
                + (", or a greater validation_fraction" if split == "validation" else "")
            )
        super().__init__(
            samples=len(tokens),
            sequence_length=sequence_length,
            max_samples=max_samples,
            fingerprint=fingerprint,
        )

    def __getitems__(self, visits: Sequence[int]) -> np.ndarray:
        """Return blocks, int32 of shape (b, s + 1).

        They have a quarter of the bytes of a batch, and need no shared memory.
        """
        blocks_bs = np.full((len(visits), self.sequence_length + 1), PADDING, np.int32)
        for row, number in enumerate(self.numbers(visits)):
            if number != PADDING:
                blocks_bs[row] = self._tokens.read(number)
        return blocks_bs

    def as_batch(self, rows: np.ndarray) -> Batch:
        """Return ``input_ids`` and ``labels``, int64 of shape (b, s), of blocks of s + 1 tokens."""
        tokens_bs = torch.from_numpy(rows).long()
        inputs_bs = tokens_bs[:, :-1].contiguous()
        labels_bs = tokens_bs[:, 1:].contiguous()
        padding_b = tokens_bs[:, 0] == PADDING
        inputs_bs[padding_b] = 0
        labels_bs[padding_b] = IGNORE_INDEX
        return {"input_ids": inputs_bs, "labels": labels_bs}


class TokenStream(BlockStream):
    """Random access to the blocks of one split of a prepared folder.

    Args:
        folder: Folder that ``prepare`` made (call ``verify_store`` first).
        split: ``"train"`` or ``"validation"``.
        sequence_length: s, tokens of a sample.
        max_samples: Use only this many blocks, from the first on.

    Raises:
        StoreError: The folder is not prepared data, or the split holds no block of this length.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        split: SplitName = "train",
        sequence_length: Size,
        max_samples: Size | None = None,
    ) -> None:
        check_arguments(TokenStream.__init__, locals())
        manifest = Manifest.read(folder)
        super().__init__(
            manifest.tokens(folder, split, block_size=sequence_length + 1),
            split=split,
            where=folder,
            sequence_length=sequence_length,
            max_samples=max_samples,
            fingerprint=manifest.fingerprint(split),
        )


# ---- The order of samples, computed from the sample number and never stored ----------------------
#
# Samples are numbered without end: number ``i`` is position ``i % size`` of epoch ``i // size``.
# Each epoch is its own permutation of all samples: a keyed Feistel network over the smallest power
# of two that holds them, repeated until the result is in range (cycle walking; Black and Rogaway,
# "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). Any number is computed directly, so a
# checkpoint saves only a position. Unlike the generator of a library, the order is the same with
# every version of every library.


_ROUNDS = 8
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def sample_order(numbers: np.ndarray, *, size: int, seed: int, shuffle: bool = True) -> np.ndarray:
    """Return the samples (0 to ``size - 1``) of sample numbers.

    Args:
        numbers: int64 array of sample numbers, counted over all epochs.
        size: Samples in an epoch.
        seed: Seed of the permutations.
        shuffle: Permute the samples. Without it, every epoch runs from 0 to ``size - 1``.

    Returns:
        int64 array of the same shape. The numbers of an epoch give each sample once.
    """
    epochs, positions = np.divmod(numbers, size)
    if not shuffle:
        return positions
    result = np.empty_like(positions)
    for epoch in np.unique(epochs):
        mask = epochs == epoch
        result[mask] = _permute(positions[mask], size, _keys(seed, int(epoch)))
    return result


def _permute(positions: np.ndarray, size: int, keys: list[np.uint64]) -> np.ndarray:
    bits = max((size - 1).bit_length(), 2)
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        values[outside] = _feistel(values[outside], bits, keys)
        outside = values >= size
    return values.astype(np.int64)


def _feistel(values: np.ndarray, bits: int, keys: list[np.uint64]) -> np.ndarray:
    """Permute the numbers of ``bits`` bits; each round changes one half by a mix of the other."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << bits // 2) - 1)
    high_mask = np.uint64((1 << bits - bits // 2) - 1)
    low = values & low_mask
    high = values >> low_bits
    for step, key in enumerate(keys):
        if step % 2:
            low = low ^ (_mix(high, key) & low_mask)
        else:
            high = high ^ (_mix(low, key) & high_mask)
    return (high << low_bits) | low


def _mix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    mixed = (values ^ key) * _MULTIPLIER
    mixed = (mixed ^ (mixed >> _SHIFT)) * _MULTIPLIER
    return mixed ^ (mixed >> _SHIFT)


def _keys(seed: int, epoch: int) -> list[np.uint64]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return [
        np.uint64(int.from_bytes(digest[8 * step : 8 * step + 8], "big")) for step in range(_ROUNDS)
    ]
