"""Kept whole by every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_ptdp.sharding import Sharding
from lightning_ptdp.tensor_parallel.kinds.kind import Kind, Place, shape_text
from lightning_ptdp.tensor_parallel.region import join_around
from lightning_ptdp.world.mesh import Group

__all__ = ["Alias", "Partial", "Whole"]


@dataclass(frozen=True, kw_only=True)
class Partial(Kind):
    """A module that is kept whole but sees only this rank's heads or features, like the norm of queries and keys between column
    and row layers: its parameters' gradients are parts of a sum over the group, with and without sequence parallelism."""

    name = "partial"
    parameters = None
    ties = "whole"
    region_part = True

    def shardings(self, module: nn.Module, place: Place) -> dict[str, Sharding]:
        return {name: Sharding.replicated(p.shape, partial=("tensor",)) for name, p in module.named_parameters()}

    def describe(self, key: str, shape: Sequence[int], *, outputs_last: bool) -> tuple[str, str]:
        return shape_text(shape), "whole; gradient partial"

    def of_child(self, name: str) -> Kind | None:
        return self


@dataclass(frozen=True, kw_only=True)
class Alias(Kind):
    """A module whose own parameters are other names of parameters of sharded modules and are not used by its forward, like
    ``predictions.bias`` of Hugging Face's BERT, which is its decoder's: they become the sharded ones."""

    name = "alias"
    parameters = None
    ties = "any"

    def shardings(self, module: nn.Module, place: Place) -> dict[str, Sharding]:
        return {}

    def describe(self, key: str, shape: Sequence[int], *, outputs_last: bool) -> tuple[str, str]:
        return "as its other name", "alias: another name of a sharded parameter"


@dataclass(frozen=True, kw_only=True)
class Whole(Kind):
    """A module inside the blocks that every rank computes for the whole sequence where the sequence is split around it: of its output
    each keeps its own slice. What is sharded in it is sharded without sequence parallelism. Without that, it says nothing."""

    name = "whole"
    parameters = None
    ties = "whole"
    keeps_sequence = True
    keeps_children = True

    def shardings(self, module: nn.Module, place: Place) -> dict[str, Sharding]:
        return {}

    def complete(self, module: nn.Module, *, group: Group) -> None:
        join_around(module, group=group)
