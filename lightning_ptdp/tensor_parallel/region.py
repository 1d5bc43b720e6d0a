"""Boundaries of sharded regions that no single column-parallel layer marks.

Three separate column-parallel projections of the same input would sum the input's gradient three
times. A region around them sums it once. Under sequence parallelism the region also shows the full
sequence to code that reads its length (``hidden_states.shape``)::

    plan.sequence  embedding  split here  block  region: gather...scatter  block  join here  head
    "ends"         splits     -           1/t    s                         1/t    -          gathers
    "blocks"       whole      1/t         1/t    s                         1/t    s          whole

With "blocks", the modules before and after the blocks (positions, masks, a pooler) see the full
sequence. A ``Whole`` module inside the blocks also sees it: the sequence is joined before the
module and split after it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import chain, repeat
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_ptdp.forward.matrix_product import autocast_dtype
from lightning_ptdp.tensor_parallel.collectives import (
    copy,
    gather_sequence,
    join_sequence,
    split_sequence,
)
from lightning_ptdp.world.mesh import Group

_FULL_SEQUENCE = "_ptdp_full_sequence"

Positional: TypeAlias = tuple[object, ...]
Keywords: TypeAlias = dict[str, object]


def enter_region(
    module: nn.Module,
    *,
    heads: int | None,
    arguments: tuple[str, ...],
    group: Group,
    sequence_parallel: bool,
) -> None:
    """Make the first argument of ``module`` enter the region once.

    Its gradient is summed over the group. Under sequence parallelism its sequence is gathered.
    ``arguments`` names arguments with an entry for each of ``heads``; the module receives only the
    entries of this rank's heads.
    """
    module.register_forward_pre_hook(
        partial(_change_input, partial(enter, group, sequence_parallel)), with_kwargs=True
    )
    if heads is not None and arguments:
        module.register_forward_pre_hook(
            partial(_own_heads, heads, arguments, group), with_kwargs=True
        )


def split_sequence_in_blocks(
    first: nn.Module | None, last: nn.Module | None, *, group: Group
) -> None:
    """Split the sequence before the block ``first`` and join it after the block ``last``.

    A block that is None (held by another pipeline stage) is skipped.
    """
    if first is not None:
        first.register_forward_pre_hook(
            partial(_change_input, partial(split_sequence, group=group)), with_kwargs=True
        )
    if last is not None:
        last.register_forward_hook(partial(_change_output, partial(join_sequence, group=group)))


def join_around(module: nn.Module, *, group: Group) -> None:
    """Join the sequence before ``module`` and split its output."""
    module.__dict__[_FULL_SEQUENCE] = True
    module.register_forward_pre_hook(
        partial(_change_input, partial(join_sequence, group=group)), with_kwargs=True
    )
    module.register_forward_hook(partial(_change_output, partial(split_sequence, group=group)))


def sees_full_sequence(module: nn.Module) -> bool:
    """Return True if the sequence is joined before ``module`` and split after it."""
    return _FULL_SEQUENCE in vars(module)


# Module-level functions, not closures: a model must stay picklable.


def _change_input(
    change: Callable[[Any], Tensor], module: nn.Module, args: Positional, kwargs: Keywords
) -> tuple[Positional, Keywords]:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    first = "hidden_states"
    if first not in kwargs:  # a caller may name the arguments in another order
        first = next(name for name in (*_parameters(module), *kwargs) if name in kwargs)
    return args, {**kwargs, first: change(kwargs[first])}


def _parameters(module: nn.Module) -> list[str]:
    """Return the names of the parameters of a module's forward, in order."""
    _self, *names = inspect.signature(type(module).forward).parameters
    return names


def _change_output(
    change: Callable[[Tensor], Tensor], _module: nn.Module, _args: object, output: Any
) -> object:
    if isinstance(output, Tensor):
        return change(output)
    return type(output)((change(output[0]), *output[1:]))


def enter(group: Group, sequence_parallel: bool, x: Tensor) -> Tensor:
    """Return the full activation and sum its gradient over the group.

    Under sequence parallelism ``x`` is this rank's slice and is gathered. Under autocast the
    activation is cast to the autocast dtype first.
    """
    dtype = autocast_dtype(x)
    x = x if dtype is None else x.to(dtype)
    return gather_sequence(x, group) if sequence_parallel else copy(x, group)


def _own_heads(
    heads: int,
    arguments: tuple[str, ...],
    group: Group,
    module: nn.Module,
    args: Positional,
    kwargs: Keywords,
) -> tuple[Positional, Keywords]:
    def own(name: str, x: object) -> object:
        return _heads_of_rank(heads, group, x) if name in arguments else x

    names = chain(_parameters(module), repeat(""))
    return (
        tuple(own(name, x) for name, x in zip(names, args, strict=False)),
        {name: own(name, x) for name, x in kwargs.items()},
    )


def _heads_of_rank(heads: int, group: Group, x: object) -> object:
    """Return the entries of this rank's heads; inputs equal for all heads are unchanged.

    (b, n, ...) -> (b, n/t, ...) for four dimensions, (b n, ...) -> (b n/t, ...) for three.
    """
    if not isinstance(x, Tensor) or (x.dim() == 4 and x.size(1) != heads):
        return x
    if x.dim() == 4:
        return x.chunk(group.size, dim=1)[group.rank]
    return torch.unflatten(x, 0, (-1, heads)).chunk(group.size, dim=1)[group.rank].flatten(0, 1)
