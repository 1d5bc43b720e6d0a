"""Records of the local parameters, from which gradients, norms, checkpoints and summaries are
derived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lightning_ptdp.parameters.sharding import Sharding
from lightning_ptdp.world.mesh import Group

__all__ = ["ParameterRecord", "Records", "Sum"]

Sum = tuple[tuple[slice, ...], Group]
"""Part of a parameter (``()``: all of it) whose gradient is a sum, and the group over which it is
one."""


@dataclass(frozen=True, kw_only=True)
class ParameterRecord:
    """A local parameter's place in the whole model.

    Attributes:
        name: Global name, the first under which the uncut model registers it.
        order: Position among the uncut model's parameters.
        sharding: Which part of the full tensor is here, and how each axis' ranks hold it.
        stages: Local pipeline stages that use it.
        data_axes: The axes whose ranks read other samples or tokens, over which its gradient is a
            sum.
        sums: The other groups over which its gradient, or a part of it, is a sum.
        tied: Whether other pipeline ranks hold it too (tied weights, modules kept by every stage).
        counted: Whether this rank is the first of those that hold it alike and read the same, and
            counts it in norms and totals (of pieces that several hold: whichever of them
            ``sharding.counted`` tells).
        leads: Whether this rank is the first of those of its block (``Axis.within``) that hold it
            alike.
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
