"""Placement of the p * v pipeline stages on the pipeline ranks.

``loop``: rank r holds the stages r, r+p, r+2p, … (arXiv 2104.04473, section 2.2). ``v``: the second
chunk runs back, so that rank r holds the stages r and 2p-1-r, and the last stage is on the rank of
the first one (arXiv 2401.10241, section 6)::

    p = 4, v = 2       rank 0    rank 1    rank 2    rank 3
    loop               0  4      1  5      2  6      3  7
    v                  0  7      1  6      2  5      3  4
"""

from __future__ import annotations

from typing import Literal

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
