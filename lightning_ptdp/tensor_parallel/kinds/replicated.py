"""Kinds that every rank holds whole, and regions around several split modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_ptdp.base.option_types import Size, check_types
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.tensor_parallel.kinds.kind import Kind, ModulePlace, check_divides
from lightning_ptdp.tensor_parallel.region import enter_region


@dataclass(frozen=True, kw_only=True)
class Partial(Kind):
    """A module that every rank holds whole, applied to this rank's heads or features.

    An example is the norm of queries and keys between column and row layers. Its parameters'
    gradients are parts of a sum over the group, with and without sequence parallelism.
    """

    name = "partial"
    sharding = "whole; gradient partial"
    parameters = None
    ties = "whole"
    region_part = True

    def partial(self, place: ModulePlace) -> tuple[str, ...]:
        return ("tensor",)

    def of_child(self, name: str) -> Kind | None:
        return self


@dataclass(frozen=True, kw_only=True)
class Alias(Kind):
    """A module whose own parameters are other names of sharded modules' parameters.

    Its forward does not use them. An example is ``predictions.bias`` of Hugging Face's BERT, which
    is its decoder's bias. The names are rebound to the sharded parameters.
    """

    name = "alias"
    parameters = None
    ties = "any"

    def placements(self, module: nn.Module, place: ModulePlace) -> dict[str, Placement]:
        return {}

    def describe(self, key: str, shape: Sequence[int], *, outputs_last: bool) -> tuple[str, str]:
        return "as its other name", "alias: another name of a sharded parameter"


@dataclass(frozen=True, kw_only=True)
class Whole(Kind):
    """A module inside the blocks that every rank computes for the full sequence.

    The sequence is split around it, and each rank keeps its own slice of the output. Modules inside
    are sharded without sequence parallelism. Without sequence parallelism this kind has no effect.
    """

    name = "whole"
    parameters = None
    ties = "whole"
    keeps_sequence = True
    keeps_children = True

    def placements(self, module: nn.Module, place: ModulePlace) -> dict[str, Placement]:
        return {}


@dataclass(frozen=True, kw_only=True)
class Region(Kind):
    """A module around column layers with a common input, and the row layer after them.

    The gradient of the module's first argument is summed over the group once, not once for each
    column layer. No module inside may be kept whole, except a ``Partial`` one.

    Attributes:
        heads: Number of attention heads; required by the next two.
        arguments: Arguments of its forward with an entry for each head, of which a rank gets its
            own heads' (the biases of ALiBi, arXiv 2108.12409): (b, n, ...) of four dimensions, (b
            n, ...) of three.
        per_head: Its own parameters with an element for each head along dimension 0, split as the
            heads are.
    """

    heads: Size | None = None
    arguments: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()

    name = "region"
    parameters = None
    is_region = True
    keeps_children = True

    def __post_init__(self) -> None:
        check_types(self)
        if (self.arguments or self.per_head) and self.heads is None:
            raise ValueError(
                f"Region(arguments={self.arguments}, per_head={self.per_head}) needs the "
                "number of heads, too"
            )

    def check(self, name: str, module: nn.Module, size: int) -> None:
        if self.heads is not None:
            check_divides(name, "number of heads", self.heads, size)

    def check_inside(self, name: str, module: nn.Module, kinds: Mapping[str, Kind]) -> None:
        for inner, child in module.named_modules():
            path = f"{name}.{inner}" if inner else name
            kind = kinds.get(path)
            names = {key for key, parameter in child._parameters.items() if parameter is not None}
            if not (kind is not None and kind.region_part) and names - set(
                () if inner else self.per_head
            ):
                raise ValueError(
                    f"'{name}' is a region, but '{path}' in it is not split, so every rank "
                    "would count its gradient. Shard it, or leave the region out of the plan"
                )

    def placements(self, module: nn.Module, place: ModulePlace) -> dict[str, Placement]:
        shapes = {key: module.get_parameter(key).shape for key in self.per_head}
        return {key: place.columns(shape, shape[:1]) for key, shape in shapes.items()}

    def build(
        self, module: nn.Module, local: Mapping[str, nn.Parameter], place: ModulePlace
    ) -> nn.Module:
        options = place.layer_options
        enter_region(module, heads=self.heads, arguments=self.arguments, **options)
        return super().build(module, local, place)
