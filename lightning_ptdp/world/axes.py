"""The axes of parallelism as a table, and divisors of their sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Reads = Literal["same", "tokens", "samples"]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A way of dividing the work; its degree is the layout's ``<name>_parallel_size``.

    Attributes:
        name: Part that it divides.
        letter: Letter of its degree in short forms.
        place: Position in the order of the ranks: those of the axis with the greatest place are
            neighbours.
        reads: Part of a batch that its ranks read: the same, other tokens of the same samples, or
            other samples.
        always_named: Name it even if its degree is 1.
        within: A set of axes (``SETS``) whose ranks it takes in blocks, instead of multiplying the
            ranks. Each block holds once all that is split over the axis. The ranks with the same
            place in the other blocks are ``<name>_replicas``.
    """

    name: str
    letter: str
    place: int = -1
    reads: Reads = "same"
    always_named: bool = True
    within: str | None = None

    @property
    def others(self) -> str:
        """Return the name of the group of ranks with the same place in the other blocks."""
        return f"{self.name}_replicas"


AXES = (
    Axis(name="tensor", letter="t", place=30),
    Axis(name="pipeline", letter="p", place=0),
    Axis(name="context", letter="c", place=20, reads="tokens", always_named=False),
    Axis(name="data", letter="d", place=10, reads="samples"),
    Axis(name="expert", letter="e", reads="samples", always_named=False, within="replica_sum"),
)


SETS: Mapping[str, tuple[Reads, ...]] = {
    "replicas": ("samples",),
    "replica_sum": ("samples", "tokens"),
    "model": ("same", "tokens"),
    "shards": ("same",),
}
"""Sets of axes, by the part of a batch that their ranks read.

They are the replicas, the ranks over which every gradient is summed, the ranks of one replica, and
the ranks that hold the parameters once.
"""


_TRIED = 100_000


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number``, in ascending order.

    For a number above 10^10, these are the divisors of at most 100,000 and their quotients.
    """
    small = [k for k in range(1, min(math.isqrt(number), _TRIED) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """Return the three divisors of ``number`` closest to ``wanted``, in ascending order.

    Error messages propose them.
    """
    return sorted(sorted(divisors(number), key=lambda k: (abs(k - wanted), k))[:3])
