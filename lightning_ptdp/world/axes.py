"""The axes of parallelism as a table, divisors of their sizes, and the stages on the pipeline axis.

The p * v pipeline stages are placed on the pipeline ranks. ``loop``: rank r holds the stages r,
r+p, r+2p, … (arXiv 2104.04473, section 2.2). ``v``: the second chunk runs back, so that rank r
holds the stages r and 2p-1-r, and the last stage is on the rank of the first one (arXiv 2401.10241,
section 6)::

    p = 4, v = 2       rank 0    rank 1    rank 2    rank 3
    loop               0  4      1  5      2  6      3  7
    v                  0  7      1  6      2  5      3  4
"""

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


def nearest_multiples(number: int, unit: int) -> str:
    """Return the multiples of ``unit`` around ``number``, for an error message: "8 or 12"."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


# ---- Placement of the pipeline stages ----------------------------------------------------------


StagePlacement = Literal["loop", "v"]
PLACEMENTS: tuple[StagePlacement, ...] = ("loop", "v")


class Stages:
    """Properties of the stages that follow from the fields of a layout, or of a schedule."""

    pipeline_parallel_size: int
    virtual_pipeline_size: int
    placement: StagePlacement

    @property
    def num_stages(self) -> int:
        """Return the number of pipeline stages, p * v."""
        return self.pipeline_parallel_size * self.virtual_pipeline_size

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that holds ``stage``."""
        chunk, rank = divmod(stage, self.pipeline_parallel_size)
        if self.placement == "v" and chunk % 2:
            return self.pipeline_parallel_size - 1 - rank
        return rank

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank holds, in ascending order: one per chunk."""
        return stages_of_rank(
            self.pipeline_parallel_size, self.virtual_pipeline_size, pipeline_rank, self.placement
        )


def stages_of_rank(p: int, v: int, rank: int, placement: StagePlacement) -> tuple[int, ...]:
    """Return the stages that pipeline rank ``rank`` holds, in ascending order: one per chunk."""
    return tuple(
        chunk * p + (p - 1 - rank if placement == "v" and chunk % 2 else rank) for chunk in range(v)
    )


def check_interleaving(pipeline_parallel_size: int, virtual_pipeline_size: int) -> None:
    """Check that several stages per rank belong to a pipeline.

    Raises:
        ValueError: There is no pipeline.
    """
    if virtual_pipeline_size > 1 and pipeline_parallel_size == 1:
        raise ValueError(
            f"virtual_pipeline_size={virtual_pipeline_size} needs a pipeline, but "
            "pipeline_parallel_size=1. Use pipeline_parallel_size=2 or more, or "
            "virtual_pipeline_size=1"
        )
