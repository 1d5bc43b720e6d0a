"""Where pipeline stages live: which rank holds which of the p * v stages.

``loop``: rank r holds the stages r, r+p, r+2p, … (arXiv 2104.04473, section 2.2). ``v``: the second chunk runs back, so that rank r
holds the stages r and 2p-1-r, and the last stage is with the first one (arXiv 2401.10241, section 6)::

    p = 4, v = 2       rank 0    rank 1    rank 2    rank 3
    loop               0  4      1  5      2  6      3  7
    v                  0  7      1  6      2  5      3  4
"""

from __future__ import annotations

from typing import Literal

__all__ = ["PLACEMENTS", "Placement", "rank_of_stage", "stages_of_rank"]

Placement = Literal["loop", "v"]
PLACEMENTS: tuple[Placement, ...] = ("loop", "v")


def rank_of_stage(stage: int, *, pipeline_parallel_size: int, placement: Placement) -> int:
    """The pipeline rank that holds ``stage``."""
    turn, rank = divmod(stage, pipeline_parallel_size)
    return pipeline_parallel_size - 1 - rank if placement == "v" and turn % 2 else rank


def stages_of_rank(
    rank: int, *, pipeline_parallel_size: int, virtual_pipeline_size: int, placement: Placement
) -> tuple[int, ...]:
    """The stages that pipeline rank ``rank`` holds, in ascending order; one a chunk."""
    p = pipeline_parallel_size
    return tuple(turn * p + (p - 1 - rank if placement == "v" and turn % 2 else rank) for turn in range(virtual_pipeline_size))
