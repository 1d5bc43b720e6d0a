"""Optimizer states under the names of their parameters, never under indices.

Two layouts hold different parameters, in a different order: index 3 of one is not index 3 of the
other (nor need it be after the model was edited). So ``exp_avg`` of the first optimizer is stored
as ``optimizer/0/exp_avg/<parameter>``, cut like the parameter; a Python number, such as a step
count kept as int, as ``optimizer/0/step:number/<parameter>``, so that it comes back as a number.

LBFGS keeps one history of all parameters together, flattened in the optimizer's order: it is stored
as it is, for ranks that hold all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError
from lightning_ptdp.checkpoint.load import Stored, load_tensors
from lightning_ptdp.checkpoint.local_rectangles import Placed
from lightning_ptdp.checkpoint.metadata import TensorEntry
from lightning_ptdp.checkpoint.reader import TensorReader
from lightning_ptdp.checkpoint.save_agreement import same_outcome
from lightning_ptdp.checkpoint.single_file import optimizer_by_name
from lightning_ptdp.parameters.sharding import Sharding

__all__ = [
    "keeps_history",
    "load_history",
    "load_indexed_optimizer",
    "load_optimizer",
    "merge_groups",
    "optimizer_groups",
    "optimizer_history",
    "optimizer_tensors",
]

Names = Mapping[torch.nn.Parameter, str]
Group = dict[str, Any]
"""Hyperparameters of a parameter group by name, and its parameters, or their global names, as
``"params"``."""

History = dict[int, Any]
"""An optimizer's state that belongs to all parameters together, as in its ``state_dict``."""

_NUMBER = ":number"
# How this machine computes the update, not what the update is: kept from the optimizer at hand when
# a checkpoint is loaded.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})


def optimizer_tensors(
    optimizer: Optimizer,
    *,
    names: Names,
    shardings: Mapping[str, Placed],
    index: int = 0,
    extra: Mapping[torch.nn.Parameter, Mapping[str, torch.Tensor]] | None = None,
) -> dict[str, tuple[torch.Tensor, Placed]]:
    """This rank's optimizer state as :func:`save_checkpoint` takes it.

    Args:
        optimizer: Any whose states are tensors of the parameter's shape, 0-d tensors, numbers or
            None (which is left out).
        names: Global name of every local parameter of the optimizer.
        shardings: The parameters' records, by global name.
        index: Which of the module's optimizers this is.
        extra: Further states of parameters, which the optimizer does not know of.

    Raises:
        CheckpointError: A parameter has no name, or a state has another shape or type; names
            optimizer, state and parameter.
    """
    found = {}
    for parameter, name in _named(optimizer, names).items():
        further = extra.get(parameter, {}) if extra is not None else {}
        for key, value in {**optimizer.state.get(parameter, {}), **further}.items():
            if value is None:
                continue
            if isinstance(value, int | float):
                key, value = (
                    key + _NUMBER,
                    torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None),
                )
            if not isinstance(key, str) or "/" in key or not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    _unsupported(optimizer, key, name, f"is a {type(value).__name__}")
                )
            if value.shape != parameter.shape and value.dim() > 0:
                what = f"has the shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}"
                raise CheckpointError(_unsupported(optimizer, key, name, what))
            like_it = value.shape == parameter.shape
            found[f"{_prefix(index)}{key}/{name}"] = (
                value,
                shardings[name] if like_it else Sharding.replicated(()),
            )
    return found


def keeps_history(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's state belongs to all parameters together."""
    return isinstance(optimizer, torch.optim.LBFGS)


def optimizer_history(optimizer: Optimizer) -> History:
    """The state of an optimizer that keeps one of all parameters together, for ``load_history``."""
    history: History = optimizer.state_dict()["state"]
    return history


def load_history(optimizer: Optimizer, saved: Mapping[str, object]) -> None:
    """Restore an optimizer's history, if it keeps one.

    Args:
        optimizer: Its groups are restored.
        saved: What was saved of the optimizer that the checkpoint was written with; its
            ``"history"``, if that kept one.

    Raises:
        CheckpointError: Only one of the two keeps one.
    """
    if keeps_history(optimizer) != ("history" in saved):
        keeps = "keeps" if "history" in saved else "does not keep"
        raise CheckpointError(
            f"the checkpoint's optimizer {keeps} a history of all parameters together, as LBFGS "
            f"does, unlike {type(optimizer).__name__}: "
            "configure the same optimizer, or load the weights alone (InitFrom)"
        )
    if keeps_history(optimizer):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": saved["history"]})


def optimizer_groups(optimizer: Optimizer, names: Names) -> list[Group]:
    """Hyperparameters of every parameter group, with the global names of its local parameters as
    ``"params"``."""
    _named(optimizer, names)
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    for group in groups:
        group.pop(
            "param_names", None
        )  # the user's, which say the same and would differ between ranks
    return groups


def merge_groups(ranks: Sequence[Sequence[Group]]) -> list[Group]:
    """One list of groups from every rank's (pipeline ranks hold different parameters): the same
    hyperparameters, all the names.

    Raises:
        CheckpointError: The ranks differ in the number of groups or in a hyperparameter.
    """
    first = ranks[0]
    for rank, groups in enumerate(ranks):
        if len(groups) != len(first):
            raise CheckpointError(
                f"the optimizer has {len(first)} parameter groups on rank 0, but {len(groups)} on "
                f"rank {rank}"
            )
        for position, (group, other) in enumerate(zip(first, groups, strict=True)):
            for key in sorted((group.keys() | other.keys()) - {"params"}):
                here, there = group.get(key), other.get(key)
                if not _equal(here, there):
                    raise CheckpointError(
                        f"parameter group {position} has {key}={here!r} on rank 0, but {there!r} "
                        f"on rank {rank}"
                    )
    every = [
        dict.fromkeys(name for group in same for name in group["params"])
        for same in zip(*ranks, strict=True)
    ]
    return [{**group, "params": list(names)} for group, names in zip(first, every, strict=True)]


def load_optimizer(
    path: str | os.PathLike[str],
    optimizer: Optimizer,
    *,
    names: Names,
    shardings: Mapping[str, Placed],
    groups: Sequence[Group],
    index: int = 0,
    open_stored: Callable[[str | os.PathLike[str]], Stored] = TensorReader,
) -> None:
    """Restore an optimizer from a checkpoint of any layout; collective over the default process
    group, if there is one.

    State tensors are made as the checkpoint lists them, in its dtypes, on the parameters' devices
    (0-d ones, which are step counts, on the CPU unless the group is ``capturable`` or ``fused``).
    Hyperparameters are restored group by group, in order; ``foreach``, ``fused``, ``capturable``
    and ``differentiable`` stay as they are.

    Args:
        path: The checkpoint folder.
        optimizer: The optimizer to fill; its old state is dropped.
        names: Global name of every local parameter of the optimizer.
        shardings: The parameters' records, by global name.
        groups: The saved groups of all ranks, from :func:`merge_groups`.
        index: Which of the module's optimizers this is.
        open_stored: What makes of ``path`` what is read; by default a checkpoint folder.

    Raises:
        CheckpointError: On every rank, if on any: the groups do not fit, or the tensors cannot be
            loaded (see :func:`load_tensors`). The optimizer is then as it was.
    """
    with same_outcome(f"loading optimizer {index} from the checkpoint {path}"):
        named = _named(optimizer, names)
        _check_groups(optimizer, names, groups)
        stored = open_stored(path)
        states = _empty_states(stored.tensors, optimizer, named, shardings, index)
    targets = {name: (value, place) for name, (_, _, value, place) in states.items()}
    load_tensors(path, targets, prefix=_prefix(index), open_stored=lambda _: stored)
    optimizer.state.clear()
    places = {
        parameter: place for place, parameter in enumerate(named)
    }  # an optimizer keeps its states in this order
    for parameter, key, value, _ in sorted(states.values(), key=lambda state: places[state[0]]):
        optimizer.state[parameter][key.removesuffix(_NUMBER)] = (
            value.item() if key.endswith(_NUMBER) else value
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        _restore_group(group, saved)


def load_indexed_optimizer(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    *,
    names: Names,
    shardings: Mapping[str, Placed],
    of_groups: Sequence[Sequence[str]],
) -> None:
    """Restore an optimizer in any layout from the ``state_dict`` of one that held the whole model;
    collective like :func:`load_optimizer`.

    Args:
        state: The saved state.
        optimizer: The optimizer to fill.
        names: Global name of every local parameter of the optimizer.
        shardings: The parameters' records, by global name.
        of_groups: Names of the saved parameters, group by group.

    Raises:
        CheckpointError: As :func:`load_optimizer`.
    """
    with same_outcome("reading the optimizer's state"):
        stored, groups = optimizer_by_name(state, of_groups, prefix=_prefix(0), number=_NUMBER)
    load_optimizer(
        "in one file",
        optimizer,
        names=names,
        shardings=shardings,
        groups=groups,
        open_stored=lambda _: stored,
    )


def _prefix(index: int) -> str:
    return f"optimizer/{index}/"


def _named(optimizer: Optimizer, names: Names) -> dict[torch.nn.Parameter, str]:
    """The optimizer's parameters with their names, in its order; nothing of its state belongs to
    anything else."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter not in names:
            raise CheckpointError(
                f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} "
                "that is not in the model"
            )
    known = {id(parameter) for parameter in parameters}
    for key in optimizer.state:
        if id(key) not in known:
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps a state that belongs to none of its "
                f"parameters: {key!r:.80}"
            )
    return {parameter: names[parameter] for parameter in parameters}


def _empty_states(
    stored: Mapping[str, TensorEntry],
    optimizer: Optimizer,
    named: Names,
    shardings: Mapping[str, Placed],
    index: int,
) -> dict[str, tuple[torch.nn.Parameter, str, torch.Tensor, Placed]]:
    """Parameter, state key and tensor to fill, for all that the checkpoint has of this rank's
    parameters, by its name there."""
    parameters = {name: parameter for parameter, name in named.items()}
    with_scalars = [
        group["params"]
        for group in optimizer.param_groups
        if group.get("capturable") or group.get("fused")
    ]
    on_device = set().union(*with_scalars)
    found: dict[str, tuple[torch.nn.Parameter, str, torch.Tensor, Placed]] = {}
    for full_name in sorted(name for name in stored if name.startswith(_prefix(index))):
        key, _, name = full_name.removeprefix(_prefix(index)).partition("/")
        if name not in parameters:
            continue
        parameter, sharding, entry = parameters[name], shardings[name], stored[full_name]
        whole = entry.shape == () and sharding.full_shape != ()
        if not whole and entry.shape != sharding.full_shape:
            raise CheckpointError(
                f"{key!r} of {name!r} has the shape {entry.shape} in the checkpoint and "
                f"{sharding.full_shape} here"
            )
        place: Placed = Sharding.replicated(()) if whole else sharding
        device = parameter.device if parameter in on_device or not whole else torch.device("cpu")
        found[full_name] = (
            parameter,
            key,
            torch.zeros(place.local_shape, dtype=entry.dtype, device=device),
            place,
        )
    return found


def _check_groups(optimizer: Optimizer, names: Names, groups: Sequence[Group]) -> None:
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, the checkpoint's "
            f"has {len(groups)}"
        )
    where = {name: position for position, group in enumerate(groups) for name in group["params"]}
    for position, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names[parameter]
            if where.get(name) != position:
                found = f"in group {where[name]}" if name in where else "in no group"
                raise CheckpointError(
                    f"{name!r} is in parameter group {position} here, but {found} of the "
                    "checkpoint's optimizer"
                )


def _restore_group(group: Group, saved: Group) -> None:
    for key, value in saved.items():
        if key == "params" or key in _IMPLEMENTATION:
            continue
        here = group.get(key)
        if isinstance(here, torch.Tensor):  # a captured or compiled step reads this very tensor
            here.fill_(value)
        else:
            group[key] = (
                value.item()
                if isinstance(here, float) and isinstance(value, torch.Tensor)
                else value
            )


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return (
        not isinstance(one, torch.Tensor)
        and not isinstance(other, torch.Tensor)
        and bool(one == other)
    )


def _unsupported(optimizer: Optimizer, key: object, name: str, what: str) -> str:
    return (
        f"{type(optimizer).__name__} cannot be checkpointed: its state {key!r} of {name!r} "
        f"{what}; only tensors of the "
        "parameter's shape, 0-d tensors and numbers are independent of the layout"
    )
