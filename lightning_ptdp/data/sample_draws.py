"""Random numbers that depend only on a key, for choices about one sample.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), seeded with a hash of the key. The numbers are the same in every process
and with every version of every library. numpy does not guarantee this for its distributions.
"""

from __future__ import annotations

import numpy as np

from lightning_ptdp.base.random import derive_seed

__all__ = ["Draws"]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Draws:
    """An endless sequence of numbers, determined by the key (integers and strings)."""

    def __init__(self, *key: object) -> None:
        self._seed = np.array([derive_seed(*key)], np.uint64)
        self._count = 0

    def uniform(self, count: int) -> np.ndarray:
        """Return the next ``count`` numbers, float64 in [0, 1)."""
        places = np.arange(self._count + 1, self._count + count + 1, dtype=np.uint64)
        self._count += count
        mixed = self._seed + places * _STEP
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
        mixed = mixed ^ (mixed >> np.uint64(31))
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return bool(self.uniform(1)[0] < probability)

    def below(self, limit: int, count: int = 1) -> np.ndarray:
        """Return ``count`` integers from 0 to ``limit - 1``, int64."""
        return (self.uniform(count) * limit).astype(np.int64)

    def shuffled(self, count: int) -> np.ndarray:
        """Return the numbers 0 to ``count - 1`` in random order."""
        return np.argsort(self.uniform(count), kind="stable")
