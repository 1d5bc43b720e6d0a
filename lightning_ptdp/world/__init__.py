"""Which rank does what: the degrees of parallelism, where every rank stands, who holds which stage,
and the process groups."""

from lightning_ptdp.world.layout import Axis, ParallelLayout
from lightning_ptdp.world.stage_placement import Placement

__all__ = ["Axis", "ParallelLayout", "Placement"]
