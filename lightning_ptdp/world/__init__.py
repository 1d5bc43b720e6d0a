"""Degrees of parallelism, coordinates of ranks, placement of stages, and process groups."""

from lightning_ptdp.world.axes import Axis
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.stage_placement import StagePlacement

__all__ = ["Axis", "ParallelLayout", "StagePlacement"]
