"""Where activations enter and leave what is spread, where one column layer cannot say so.

Three projections of the same input, each a column layer of its own, would sum the input's gradient three times. A region around them
does it once; under sequence parallelism it also shows the whole sequence to code that reads its length (``hidden_states.shape``)::

    plan.sequence     embedding   split here   block   region: gather ... scatter   block   joined here   head
    "ends"            splits      -            1/t     s                            1/t     -             gathers
    "blocks"          whole       1/t          1/t     s                            1/t     s             whole

With "blocks" whatever a model computes before and behind its blocks (positions, masks, a pooler) sees the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_ptdp.mesh import Group
from lightning_ptdp.tensor_parallel.collectives import copy, gather_sequence, join_sequence, split_sequence
from lightning_ptdp.tensor_parallel.kinds import Kind, Region
from lightning_ptdp.weight_gradients import autocast_dtype

__all__ = ["enter_region", "is_in_region", "split_sequence_in_blocks"]


def is_in_region(name: str, kinds: Mapping[str, Kind]) -> bool:
    """Whether a module around ``name`` is a region."""
    while name:
        name = name.rpartition(".")[0]
        if isinstance(kinds.get(name), Region):
            return True
    return False


def enter_region(module: nn.Module, *, group: Group, sequence_parallel: bool) -> None:
    """Let the first argument of ``module`` enter once: its gradient is summed over the group, its sequence gathered."""
    module.register_forward_pre_hook(partial(_change_input, partial(_enter, group, sequence_parallel)), with_kwargs=True)


def split_sequence_in_blocks(first: nn.Module | None, last: nn.Module | None, *, group: Group) -> None:
    """Split the sequence in front of the block ``first`` and join it behind the block ``last``, where they are here."""
    if first is not None:
        first.register_forward_pre_hook(partial(_change_input, partial(_split, group)), with_kwargs=True)
    if last is not None:
        last.register_forward_hook(partial(_join, group))


# Functions of the module, not closures: a model can be pickled.


def _change_input(
    change: Callable[[Tensor], Tensor], _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    first = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, first: change(kwargs[first])}


def _enter(group: Group, sequence_parallel: bool, x: Tensor) -> Tensor:
    dtype = autocast_dtype(x)
    x = x if dtype is None else x.to(dtype)
    return gather_sequence(x, group) if sequence_parallel else copy(x, group)


def _split(group: Group, x: Tensor) -> Tensor:
    return split_sequence(x, group)


def _join(group: Group, _module: nn.Module, _args: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return join_sequence(output, group)
    return type(output)((join_sequence(output[0], group), *output[1:]))
