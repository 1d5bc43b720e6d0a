"""Random numbers that belong to a key, for choices about one sample.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)
from a hash of the key: the same in every process and in every version of every library, which numpy
does not promise of its distributions."""

from __future__ import annotations

import numpy as np

from lightning_ptdp.base.random import derive_seed

__all__ = ["Draws"]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Draws:
    """An endless row of numbers; the key (integers and strings) decides all of them."""

    def __init__(self, *key: object) -> None:
        self._seed = np.array([derive_seed(*key)], np.uint64)
        self._count = 0

    def uniform(self, count: int) -> np.ndarray:
        """The next ``count`` numbers, float64 in [0, 1)."""
        places = np.arange(self._count + 1, self._count + count + 1, dtype=np.uint64)
        self._count += count
        mixed = self._seed + places * _STEP
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
        mixed = mixed ^ (mixed >> np.uint64(31))
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return bool(self.uniform(1)[0] < probability)

    def below(self, limit: int, count: int = 1) -> np.ndarray:
        """``count`` integers from 0 to ``limit - 1``, int64."""
        return (self.uniform(count) * limit).astype(np.int64)

    def shuffled(self, count: int) -> np.ndarray:
        """The numbers 0 to ``count - 1`` in random order."""
        return np.argsort(self.uniform(count), kind="stable")
