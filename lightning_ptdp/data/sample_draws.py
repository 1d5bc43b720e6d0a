"""Random numbers that depend only on a key, for choices about one sample.

They are computed from the raw numbers of numpy's PCG64, seeded with a hash of the key. numpy
guarantees these for every version, unlike those of its distributions.
"""

from __future__ import annotations

import numpy as np

from lightning_ptdp.base.random import derive_seed

__all__ = ["Draws"]


class Draws:
    """An endless sequence of numbers, determined by the key (integers and strings)."""

    def __init__(self, *key: object) -> None:
        self._bits = np.random.PCG64(derive_seed(*key))

    def uniform(self, count: int) -> np.ndarray:
        """Return the next ``count`` numbers, float64 in [0, 1)."""
        raw = np.asarray(self._bits.random_raw(count), np.uint64)
        return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return bool(self.uniform(1)[0] < probability)

    def below(self, limit: int, count: int = 1) -> np.ndarray:
        """Return ``count`` integers from 0 to ``limit - 1``, int64."""
        return (self.uniform(count) * limit).astype(np.int64)

    def shuffled(self, count: int) -> np.ndarray:
        """Return the numbers 0 to ``count - 1`` in random order."""
        return np.argsort(self.uniform(count), kind="stable")
