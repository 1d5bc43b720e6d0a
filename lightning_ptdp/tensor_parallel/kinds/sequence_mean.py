"""Kind of modules that average over a sequence, for context parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_ptdp.forward.own_forward import OwnForward, replace_forward
from lightning_ptdp.tensor_parallel.collectives import total
from lightning_ptdp.tensor_parallel.kinds.kind import Kind, ModulePlace, shape_text
from lightning_ptdp.world.mesh import Group

__all__ = ["Mean"]


@dataclass(frozen=True, kw_only=True)
class Mean(Kind):
    """A module without parameters that returns a mean over the tokens of each sequence.

    Under context parallelism the result is the mean of the ranks' results, whose parts are equally
    long. Its gradient is the sum of the gradients from all ranks' losses.
    """

    name = "mean"
    axis = "context"
    takes = "a module without parameters that returns a mean over the sequence"
    parameters = frozenset()

    def build(
        self, module: nn.Module, local: Mapping[str, nn.Parameter], place: ModulePlace
    ) -> nn.Module:
        replace_forward(module, _MeanForward, group=place.group)
        return module

    def describe(self, key: str, shape: Sequence[int], *, outputs_last: bool) -> tuple[str, str]:
        return shape_text(shape), "whole"


@dataclass(frozen=True, eq=False, kw_only=True)
class _MeanForward(OwnForward):
    group: Group

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        own: Tensor = self.original(*args, **kwargs)
        return total(own, self.group) / self.group.size
