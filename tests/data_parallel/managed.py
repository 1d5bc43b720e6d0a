"""Managed parameters of a rank that holds the whole model."""

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from lightning_ptdp.parameters.managed_parameter import ManagedParameter
from lightning_ptdp.parameters.placement import Placement, Sum


def managed(
    parameters: Iterable[nn.Parameter],
    *,
    stages: tuple[int, ...] = (0,),
    sums: tuple[Sum, ...] = (),
) -> list[ManagedParameter]:
    """Return unsharded parameters; ``sums`` are further reductions of each gradient."""
    return [
        ManagedParameter(
            parameter=parameter,
            placement=replace(Placement.replicated(parameter.shape), sums=sums),
            stages=stages,
        )
        for parameter in parameters
    ]
