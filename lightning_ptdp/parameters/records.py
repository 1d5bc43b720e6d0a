"""Records of the local parameters.

Gradients, norms, checkpoints and summaries are derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lightning_ptdp.parameters.sharding import Sharding
from lightning_ptdp.world.mesh import Group

__all__ = ["ParameterRecord", "Records", "Sum"]

Sum = tuple[tuple[slice, ...], Group]
"""Part of a parameter (``()``: all) whose gradient is a sum, and the group of the sum."""


@dataclass(frozen=True, kw_only=True)
class ParameterRecord:
    """Place of a local parameter in the whole model.

    Attributes:
        name: Global name, the first under which the uncut model registers it.
        order: Position among the uncut model's parameters.
        sharding: The local part of the full tensor, and its distribution over the ranks of each
            axis.
        stages: Local pipeline stages that use it.
        data_axes: Axes whose ranks read different samples or tokens; its gradient is a sum over
            them.
        sums: Further groups over which its gradient, or a part of it, is a sum.
        tied: Whether other pipeline ranks hold it too (tied weights, modules kept by every stage).
        counted: Whether this rank counts it in norms and totals: the first of the ranks that hold
            it alike and read the same data. For pieces that several ranks hold,
            ``sharding.counted`` selects the rank.
        leads: Whether this rank is the first of the ranks of its block (``Axis.within``) that hold
            it alike.
    """

    name: str
    order: int
    sharding: Sharding
    stages: tuple[int, ...]
    data_axes: tuple[str, ...]
    sums: tuple[Sum, ...]
    tied: bool
    counted: bool
    leads: bool = True


Records = Mapping[nn.Parameter, ParameterRecord]
"""Record of every local parameter, by identity."""
