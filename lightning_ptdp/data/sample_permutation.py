"""The order of samples, computed from the sample number and never stored.

Samples are numbered without end: number ``i`` is position ``i % size`` of epoch ``i // size``. Each
epoch is its own permutation of all samples: a keyed Feistel network over the smallest power of two
that holds them, repeated until the result is in range (cycle walking; Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", CT-RSA 2002). Any number is computed directly, so a checkpoint saves
only a position. Unlike the generator of a library, the order is the same with every version of
every library.
"""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["sample_order", "sample_visits"]

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
    epochs, places = np.divmod(numbers, size)
    if not shuffle:
        return places
    result = np.empty_like(places)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        result[here] = _permute(places[here], size, _keys(seed, int(epoch)))
    return result


def sample_visits(numbers: np.ndarray, *, size: int, seed: int, shuffle: bool = True) -> np.ndarray:
    """Return ``epoch * size + sample``, with the samples of ``sample_order``."""
    return numbers // size * size + sample_order(numbers, size=size, seed=seed, shuffle=shuffle)


def _permute(places: np.ndarray, size: int, keys: list[np.uint64]) -> np.ndarray:
    bits = max((size - 1).bit_length(), 2)
    values = places.astype(np.uint64)
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
    low, high = values & low_mask, values >> low_bits
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
