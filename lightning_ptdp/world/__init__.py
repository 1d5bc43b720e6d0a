"""Degrees of parallelism, coordinates of ranks, placement of stages, and process groups."""

from lightning_ptdp.world.layout import Axis, ParallelLayout
from lightning_ptdp.world.stage_placement import Placement

__all__ = ["Axis", "ParallelLayout", "Placement"]
