"""Interface of a kind of tensor parallelism: the one place that defines all of its methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_ptdp.parameters.sharding import Sharding, slice_full
from lightning_ptdp.tensor_parallel.linear_like import has_own_forward
from lightning_ptdp.tensor_parallel.tensor_shards import shard_columns
from lightning_ptdp.world.layout import nearest_divisors
from lightning_ptdp.world.mesh import Group

__all__ = [
    "SPLIT_AXES",
    "Kind",
    "Place",
    "SplitAxis",
    "check_divides",
    "check_embedding",
    "shape_text",
]

SplitAxis = Literal["tensor", "expert", "context"]
SPLIT_AXES = (*get_args(SplitAxis), "expert_tensor")
"""The axes over whose ranks kinds split, and over how many tensor-parallel ranks experts are."""

_ALONE = Group()
_REPLACED = (nn.Linear, nn.Embedding, nn.MultiheadAttention)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Group and options with which a module is sharded.

    Attributes:
        group: That of the kind's axis.
        sequence_parallel: Whether activations around the module are split along the sequence.
        shared: ``id`` of an original parameter -> its new one, read and extended: tied weights stay
            one parameter. Whoever made it keeps the originals alive as long as it, since Python
            reuses ids.
        enters: Whether no region is around the module that sums its input's gradient.
        tensor: The tensor group.
        name: Of the module.
    """

    group: Group
    sequence_parallel: bool
    shared: dict[int, nn.Parameter]
    enters: bool = True
    tensor: Group = _ALONE
    name: str = ""

    @property
    def partial(self) -> tuple[str, ...]:
        """The axes over which the gradient of a parameter is summed that sees a slice of the
        sequence, where it is split."""
        return ("tensor",) if self.sequence_parallel else ()

    def columns(
        self,
        shape: Sequence[int],
        parts: Sequence[int],
        *,
        copies: Sequence[int] | None = None,
        dim: int = 0,
    ) -> Sharding:
        """``shard_columns`` over the group."""
        return shard_columns(
            shape, parts=parts, size=self.group.size, index=self.group.rank, copies=copies, dim=dim
        )

    def local(self, module: nn.Module, name: str, sharding: Sharding) -> nn.Parameter:
        """The parameter ``name`` of the module as it is here: its part, or itself if it is not
        split."""
        original = module.get_parameter(name)
        if id(original) not in self.shared:
            new = original
            if sharding.sharded:
                with torch.no_grad():
                    new = nn.Parameter(
                        slice_full(original, sharding), requires_grad=original.requires_grad
                    )
                vars(new).update(vars(original))  # marks that optimizers and initializers read
            self.shared[id(original)] = new
        return self.shared[id(original)]


class Kind:
    """Way in which one module becomes parallel.

    A further kind is a class derived from this one, and a line in ``KINDS`` if it has a name.

    Attributes:
        name: In plans; "" if it has none.
        axis: Over whose ranks it splits.
        takes: Types of modules in words; "" for any.
        parameters: Those that a module may have; None: any.
        ties: How a weight may be tied: to modules of the "same" kind, as a "whole" one, or as
            another name of "any".
        region_part: Whether a region may hold the module.
        is_region: Whether it sums the gradient of what enters it, for all modules in it.
        keeps_sequence: Whether what is in the module sees the whole sequence under sequence
            parallelism.
        keeps_children: Whether the modules in it go on being modules of their own.
        pads: Whether the first dimension is padded to what divides.
    """

    name: ClassVar[str] = ""
    axis: ClassVar[SplitAxis] = "tensor"
    takes: ClassVar[str] = ""
    parameters: ClassVar[frozenset[str] | None] = frozenset(("weight", "bias"))
    ties: ClassVar[Literal["same", "whole", "any"]] = "same"
    region_part: ClassVar[bool] = False
    is_region: ClassVar[bool] = False
    keeps_sequence: ClassVar[bool] = False
    keeps_children: ClassVar[bool] = False
    pads: ClassVar[bool] = False

    def at(self, degrees: Mapping[str, int]) -> Kind | None:
        """The kind where ``SPLIT_AXES`` have these degrees; None: it does nothing there."""
        return self if degrees[self.axis] > 1 else None

    # ---- what it takes ---------------------------------------------------------------------------

    def fits(self, module: nn.Module) -> bool:
        """Return True if the module is of a type in ``takes``."""
        return True

    def misfit(self, module: nn.Module) -> str | None:
        """Why the module cannot be sharded so, by its type; None if it can."""
        if self.takes and not self.fits(module):
            return f"that takes {self.takes}"
        for base in _REPLACED if self.takes else ():
            if has_own_forward(module, base):
                return f"its forward is not that of nn.{base.__name__}, and what it does beside would be lost; leave it out of the plan"
        return None

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that the module ``name`` can be sharded over ``size`` ranks.

        Raises:
            ValueError: It cannot.
        """

    def check_sequence(self, name: str, module: nn.Module) -> None:
        """Check that the module can stand where the sequence is split.

        Raises:
            ValueError: It cannot.
        """

    def check_inside(self, name: str, module: nn.Module, kinds: Mapping[str, Kind]) -> None:
        """Check the modules in it, given the kinds of all modules by name.

        Raises:
            ValueError: One cannot be there.
        """

    def copies(self, size: int) -> tuple[int, ...]:
        """Return the number of ranks that hold the same slice, for each part of the module."""
        return ()

    # ---- what it does ----------------------------------------------------------------------------

    def shard(self, module: nn.Module, place: Place) -> tuple[nn.Module, dict[str, Sharding]]:
        """The module to put in its place, and a sharding for each of its parameters, by their names
        in it."""
        shardings = self.shardings(module, place)
        local = {name: place.local(module, name, sharding) for name, sharding in shardings.items()}
        new = self.build(module, local, place)
        return new if new is module else new.train(module.training), shardings

    def shardings(self, module: nn.Module, place: Place) -> dict[str, Sharding]:
        """Return the sharding of every parameter; by default each rank has it whole."""
        return {
            name: Sharding.replicated(parameter.shape, partial=place.partial)
            for name, parameter in module.named_parameters()
        }

    def build(
        self, module: nn.Module, local: Mapping[str, nn.Parameter], place: Place
    ) -> nn.Module:
        """The parallel version of the module from its local parameters; without a word of the
        kind's own the module, with them in it."""
        for name, parameter in local.items():
            parent, _, key = name.rpartition(".")
            module.get_submodule(parent).register_parameter(key, parameter)
        return module

    def complete(self, module: nn.Module, *, group: Group) -> None:
        """Do what sequence parallelism needs when all modules have been sharded."""

    # ---- what it says ----------------------------------------------------------------------------

    def describe(self, key: str, shape: Sequence[int], *, outputs_last: bool) -> tuple[str, str]:
        """(shape on one of t ranks, what becomes of it) for the parameter ``key`` of a module."""
        return shape_text(shape), "whole; gradient partial under sequence parallelism"

    def of_child(self, name: str) -> Kind | None:
        """The kind of a child that this one shards as well, for ``describe``."""
        return None


def check_divides(name: str, label: str, number: int, size: int, *, axis: str = "tensor") -> None:
    """Check that ``number``, the ``label`` of the module ``name``, divides.

    Raises:
        ValueError: It does not; says what would.
    """
    if number % size:
        raise ValueError(
            f"'{name}': {label}={number} is not divisible by {axis}_parallel_size={size}; a size "
            "that works: "
            f"{nearest_divisors(number, size)}"
        )


def check_embedding(name: str, module: nn.Module, size: int) -> None:
    """Check an embedding's options, if the module is one.

    Raises:
        ValueError: One of them looks at all tokens or all rows.
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
                f"'{name}': nn.Embedding({option}={value}) cannot be sharded over {size} ranks; "
                "build it without, or leave it out of the "
                "plan"
            )


def shape_text(shape: Sequence[object] | Tensor, dim: int | None = None) -> str:
    """``(8, 4)``, or with ``dim=0`` ``(8/t, 4)``."""
    sizes = [f"{size}/t" if index == dim else str(size) for index, size in enumerate(shape)]
    return f"({', '.join(sizes)})"
