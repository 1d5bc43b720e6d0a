"""Interface of a kind: the one place that defines all of its methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_ptdp.parameters.placement import Placement, slice_full
from lightning_ptdp.tensor_parallel.tensor_shards import shard_columns
from lightning_ptdp.world.axes import nearest_divisors
from lightning_ptdp.world.mesh import Group

SplitAxis = Literal["tensor", "expert"]
SPLIT_AXES = (*get_args(SplitAxis), "expert_tensor")
"""Axes over whose ranks kinds split, and the tensor-parallel split of the experts."""

_ALONE = Group()
_REPLACED = (nn.Linear, nn.Embedding, nn.MultiheadAttention)
# Subclasses of nn.Linear with a different forward that computes the same result.
_AS_LINEAR = frozenset({("transformers.models.falcon.modeling_falcon", "FalconLinear")})


@dataclass(frozen=True, kw_only=True)
class ModulePlace:
    """Group and options with which a module is sharded.

    Attributes:
        group: The group of the kind's axis.
        sequence_parallel: Whether activations around the module are split along the sequence.
        shared: Maps the ``id`` of an original parameter to its replacement. Read and extended, so
            that tied weights stay one parameter. Its creator must keep the originals alive as long
            as this dict, because Python reuses ids.
        enters: True if no enclosing region sums the input's gradient.
        tensor: The tensor group.
        name: Name of the module.
    """

    group: Group
    sequence_parallel: bool
    shared: dict[int, nn.Parameter]
    enters: bool = True
    tensor: Group = _ALONE
    name: str = ""

    @property
    def layer_options(self) -> dict[str, Any]:
        """Return the arguments that all parallel layers have."""
        return {"group": self.group, "sequence_parallel": self.sequence_parallel}

    def columns(
        self,
        shape: Sequence[int],
        parts: Sequence[int],
        *,
        copies: Sequence[int] | None = None,
        dim: int = 0,
    ) -> Placement:
        """Call ``shard_columns`` for the group."""
        return shard_columns(
            shape, parts=parts, size=self.group.size, index=self.group.rank, copies=copies, dim=dim
        )

    def local(self, module: nn.Module, name: str, placement: Placement) -> nn.Parameter:
        """Return the local part of a module's parameter, or the parameter if it is not split."""
        original = module.get_parameter(name)
        if id(original) not in self.shared:
            new = original
            if placement.sharded:
                with torch.no_grad():
                    new = nn.Parameter(
                        slice_full(original, placement), requires_grad=original.requires_grad
                    )
                vars(new).update(vars(original))  # attributes that optimizers and initializers read
            self.shared[id(original)] = new
        return self.shared[id(original)]


class Kind:
    """Way in which one module becomes parallel.

    To add a kind, derive a class from this one, and add it to ``KINDS`` if it has a name.

    Attributes:
        name: Name in plans; "" if it has none.
        axis: Axis over whose ranks it splits.
        takes: Description of the module types that it accepts; "" for any.
        types: These types, if ``fits`` needs no other condition.
        parameters: Names of the parameters that a module may have; None: any.
        ties: Modules that may share a weight with this one. "same": modules of the same kind.
            "whole": modules that keep the weight whole. "any": all modules (another name of the
            weight).
        region_part: True if a region may contain the module.
        is_region: True if it sums the gradient of its input for all modules inside.
        keeps_sequence: True if the modules inside see the full sequence under sequence parallelism.
        keeps_children: True if the modules inside remain modules of their own.
        pads: True if the first dimension is padded to a multiple of the group's size.
        sharding: Description of its parameters, for ``describe``.
        split_dim: Dimension along which it splits all of them, for ``describe``; None: another one
            for each, or none.
    """

    name: ClassVar[str] = ""
    axis: ClassVar[SplitAxis] = "tensor"
    takes: ClassVar[str] = ""
    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Module,)
    parameters: ClassVar[frozenset[str] | None] = frozenset(("weight", "bias"))
    ties: ClassVar[Literal["same", "whole", "any"]] = "same"
    region_part: ClassVar[bool] = False
    is_region: ClassVar[bool] = False
    keeps_sequence: ClassVar[bool] = False
    keeps_children: ClassVar[bool] = False
    pads: ClassVar[bool] = False
    sharding: ClassVar[str] = "whole; gradient partial under sequence parallelism"
    split_dim: ClassVar[int | None] = None

    def at(self, degrees: Mapping[str, int]) -> Kind | None:
        """Return the kind for these degrees of ``SPLIT_AXES``, or None if it splits nothing."""
        return self if degrees[self.axis] > 1 else None

    # ---- checks ----------------------------------------------------------------------------------

    def fits(self, module: nn.Module) -> bool:
        """Return True if the module is of a type in ``takes``."""
        return isinstance(module, self.types)

    def misfit(self, module: nn.Module) -> str | None:
        """Return why the module's type cannot be sharded, or None if it can."""
        if self.takes and not self.fits(module):
            return f"that takes {self.takes}"
        for base in _REPLACED if self.takes else ():
            if has_own_forward(module, base):
                return (
                    f"its forward is not that of nn.{base.__name__}, and its additional "
                    "operations would be lost. Leave it out of the plan"
                )
        return None

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that the module ``name`` can be sharded over ``size`` ranks.

        Raises:
            ValueError: It cannot.
        """

    def check_sequence(self, name: str, module: nn.Module) -> None:
        """Check that the module supports an input that is split along the sequence.

        Raises:
            ValueError: It does not.
        """

    def check_inside(self, name: str, module: nn.Module, kinds: Mapping[str, Kind]) -> None:
        """Check the modules inside, given the kinds of all modules by name.

        Raises:
            ValueError: A module must not be inside of this one.
        """

    def copies(self, size: int) -> tuple[int, ...]:
        """Return the number of ranks that hold the same slice, for each part of the module."""
        return ()

    # ---- sharding --------------------------------------------------------------------------------

    def shard(
        self, module: nn.Module, place: ModulePlace
    ) -> tuple[nn.Module, dict[str, Placement]]:
        """Return the replacement module, and a placement for each parameter by its name."""
        placements = self.placements(module, place)
        local = {
            name: place.local(module, name, placement) for name, placement in placements.items()
        }
        new = self.build(module, local, place)
        return new if new is module else new.train(module.training), placements

    def placements(self, module: nn.Module, place: ModulePlace) -> dict[str, Placement]:
        """Return the placement of every parameter; by default each rank holds it whole."""
        partial = self.partial(place)
        return {
            name: Placement.replicated(parameter.shape, partial=partial)
            for name, parameter in module.named_parameters()
        }

    def partial(self, place: ModulePlace) -> tuple[str, ...]:
        """Return the axes over which a whole parameter's gradient must be summed.

        By default, the gradient is partial if the parameter sees a slice of the sequence.
        """
        return ("tensor",) if place.sequence_parallel else ()

    def build(
        self, module: nn.Module, local: Mapping[str, nn.Parameter], place: ModulePlace
    ) -> nn.Module:
        """Build the parallel version of the module from its local parameters.

        The default is the module itself, with these parameters registered.
        """
        for name, parameter in local.items():
            parent, _, key = name.rpartition(".")
            module.get_submodule(parent).register_parameter(key, parameter)
        return module

    # ---- description -----------------------------------------------------------------------------

    def describe(self, key: str, shape: Sequence[int], *, outputs_last: bool) -> tuple[str, str]:
        """Return (shape on one of t ranks, description) for the parameter ``key`` of a module."""
        return shape_text(shape, self.split_dim, self.axis[0]), self.sharding

    def of_child(self, name: str) -> Kind | None:
        """Return the kind of a child that this one also shards, for ``describe``."""
        return None


def has_own_forward(module: nn.Module, base: type[nn.Module]) -> bool:
    """Return True if an object of a subclass of ``base`` computes something else.

    An example is an embedding that scales its output, or whose ``forward`` is set on the object.
    """
    kind = type(module)
    if not isinstance(module, base):
        return False
    is_known = (kind.__module__, kind.__name__) in _AS_LINEAR
    return "forward" in vars(module) or (kind.forward is not base.forward and not is_known)


def check_divides(name: str, label: str, number: int, size: int, *, axis: str = "tensor") -> None:
    """Check that ``number``, the ``label`` of the module ``name``, divides by ``size``.

    Raises:
        ValueError: It does not; the message names sizes that work.
    """
    if number % size:
        raise ValueError(
            f"'{name}': {label}={number} is not divisible by {axis}_parallel_size={size}. "
            f"Sizes that work: {nearest_divisors(number, size)}"
        )


def check_embedding(name: str, module: nn.Module, size: int) -> None:
    """Check an embedding's options, if the module is one.

    Raises:
        ValueError: An option needs all tokens or all rows.
    """
    if not isinstance(module, nn.Embedding):
        return
    options = {
        "max_norm": module.max_norm,
        "scale_grad_by_freq": module.scale_grad_by_freq,
        "sparse": module.sparse,
    }
    for option, value in options.items():
        if value:
            raise ValueError(
                f"'{name}': nn.Embedding({option}={value}) cannot be sharded over {size} "
                "ranks. Build it without this option, or leave it out of the plan"
            )


def shape_text(shape: Sequence[object] | Tensor, dim: int | None = None, letter: str = "t") -> str:
    """Format ``(8, 4)``, or with ``dim=0`` ``(8/t, 4)``."""
    sizes = [f"{size}/{letter}" if index == dim else str(size) for index, size in enumerate(shape)]
    return f"({', '.join(sizes)})"
