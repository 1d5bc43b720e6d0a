"""Optimizer states under the names of their parameters, never under indices.

Two layouts hold different parameters in a different order, so that index 3 of one is not index 3 of
the other. An edited model may differ in the same way. Therefore ``exp_avg`` of the first optimizer
is stored as ``optimizer/0/exp_avg/<parameter>``, sharded like the parameter. A Python number, such
as an int step count, is stored as ``optimizer/0/step:number/<parameter>``, so that it is read back
as a number. A state of another shape, such as Adafactor's means over rows, is stored in full;
this requires that no layout divides its parameter among optimizers.

LBFGS keeps one history of all parameters together, flattened in the optimizer's order. It is stored
unchanged, for ranks that hold all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ptdp.checkpoint.metadata import TensorEntry
from lightning_ptdp.checkpoint.reader import MODEL, InMemory, Stored, TensorReader, load_tensors
from lightning_ptdp.checkpoint.remote_path import PathLike
from lightning_ptdp.checkpoint.save_agreement import CheckpointError, same_outcome
from lightning_ptdp.parameters.placement import Placement

Names = Mapping[Parameter, str]
Group = dict[str, Any]
"""Hyperparameters of a parameter group by name.

``"params"`` holds its parameters or their global names.
"""

History = dict[int, Any]
"""An optimizer's state that belongs to all parameters together, as in its ``state_dict``."""

_EmptyState = tuple[Parameter, str, Tensor, Placement]
"""A parameter, the key of one of its states, the tensor to fill, and the tensor's placement."""
MASTER = "master"
"""Name of a parameter's float32 copy among the optimizer's states."""
_NUMBER = ":number"
# These options select how this machine computes the update; they do not change the update. When a
# checkpoint is loaded, the optimizer keeps its own values.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
# torch's schedulers add these options to the groups.
_OF_SCHEDULERS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)


def optimizer_tensors(
    optimizer: Optimizer,
    *,
    names: Names,
    placements: Mapping[str, Placement],
    index: int = 0,
    extra: Mapping[Parameter, Mapping[str, Tensor]] | None = None,
) -> dict[str, tuple[Tensor, Placement]]:
    """Return this rank's optimizer state for :func:`save_checkpoint`.

    Args:
        optimizer: An optimizer whose states are tensors, numbers or None (which is left out). The
            tensors have the parameter's shape or no dimensions, unless every rank holds all of it.
        names: Global name of every local parameter of the optimizer.
        placements: Placements of the parameters, by global name.
        index: Number of the optimizer among the module's optimizers.
        extra: Further states of parameters that are not in the optimizer.

    Raises:
        CheckpointError: A parameter has no name, or a state has another shape or type. The message
            names optimizer, state and parameter.
    """
    tensors = {}
    for parameter, name in _named(optimizer, names).items():
        further = extra.get(parameter, {}) if extra is not None else {}
        for key, value in {**optimizer.state.get(parameter, {}), **further}.items():
            if value is None:
                continue
            key, value = _as_tensor(key, value)
            place = placements[name]
            problem = ""
            if not isinstance(key, str) or "/" in key or not isinstance(value, Tensor):
                problem = f"is a {type(value).__name__}"
            elif value.shape != parameter.shape:
                if value.dim() > 0 and not _holds_all(place):
                    problem = (
                        f"has the shape {tuple(value.shape)}, but the parameter, which ranks "
                        f"divide, has {tuple(parameter.shape)}"
                    )
                place = Placement.replicated(value.shape)
            if problem:
                raise CheckpointError(
                    f"{type(optimizer).__name__} cannot be checkpointed: its state {key!r} of "
                    f"{name!r} {problem}. A state must be a number, a tensor without dimensions, "
                    "or a tensor of the parameter's shape. If ranks do not divide the parameter, "
                    "it may be any tensor"
                )
            tensors[f"{_prefix(index)}{key}/{name}"] = (value, place)
    return tensors


def check_same_options(optimizer: Optimizer, groups: Sequence[Group]) -> None:
    """Check that saved groups are not those of another class of optimizers.

    The options of two versions of one class differ in one direction only.

    Raises:
        CheckpointError: The groups and the optimizer have options that the other lacks.
    """
    saved = set().union(*groups)
    absent = optimizer.defaults.keys() - saved - _IMPLEMENTATION
    unknown = saved.difference(*optimizer.param_groups) - _OF_SCHEDULERS
    if saved and absent and unknown:
        raise CheckpointError(
            f"the checkpoint's optimizer has the options {sorted(unknown)}, but "
            f"{type(optimizer).__name__} has {sorted(absent)} instead. Configure the same "
            "optimizer, or load only the weights (InitFrom)"
        )


def keeps_history(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's state belongs to all parameters together."""
    return isinstance(optimizer, torch.optim.LBFGS)


def optimizer_history(optimizer: Optimizer) -> History:
    """Return the state of an optimizer with a history of all parameters, for ``load_history``."""
    return optimizer.state_dict()["state"]


def load_history(optimizer: Optimizer, saved: Mapping[str, object]) -> None:
    """Restore an optimizer's history, if it has one.

    Args:
        optimizer: An optimizer whose groups are already restored.
        saved: Saved content of the checkpoint's optimizer, with ``"history"`` if that has a
            history.

    Raises:
        CheckpointError: Only one of the two optimizers has a history.
    """
    if keeps_history(optimizer) != ("history" in saved):
        keeps = "keeps" if "history" in saved else "does not keep"
        raise CheckpointError(
            f"the checkpoint's optimizer {keeps} a common history of all parameters, as LBFGS "
            f"does, unlike {type(optimizer).__name__}. Configure the same optimizer, or load "
            "only the weights (InitFrom)"
        )
    if keeps_history(optimizer):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": saved["history"]})


def optimizer_groups(optimizer: Optimizer, names: Names) -> list[Group]:
    """Return the hyperparameters of every parameter group.

    ``"params"`` holds the global names of the group's local parameters. Tensors are on the CPU,
    because ranks compare them.
    """
    _named(optimizer, names)
    groups = []
    for group in optimizer.param_groups:
        values = {
            key: value.cpu() if isinstance(value, Tensor) else value for key, value in group.items()
        }
        # The user's names have the same content, and would differ between ranks.
        values.pop("param_names", None)
        groups.append({**values, "params": [names[parameter] for parameter in group["params"]]})
    return groups


def merge_groups(ranks: Sequence[Sequence[Group]]) -> list[Group]:
    """Return the merged groups of all ranks: the same hyperparameters, and all names.

    Pipeline ranks hold different parameters.

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
        for position, (group, peer_group) in enumerate(zip(first, groups, strict=True)):
            for key in sorted((group.keys() | peer_group.keys()) - {"params"}):
                value, peer_value = group.get(key), peer_group.get(key)
                if not _equal(value, peer_value):
                    raise CheckpointError(
                        f"parameter group {position} has {key}={value!r} on rank 0, but "
                        f"{peer_value!r} on rank {rank}"
                    )
    all_names = [
        dict.fromkeys(name for group in matching for name in group["params"])
        for matching in zip(*ranks, strict=True)
    ]
    return [{**group, "params": list(names)} for group, names in zip(first, all_names, strict=True)]


def load_optimizer(
    path: PathLike,
    optimizer: Optimizer,
    *,
    names: Names,
    placements: Mapping[str, Placement],
    groups: Sequence[Group],
    index: int = 0,
    open_stored: Callable[[PathLike], Stored] = TensorReader,
) -> None:
    """Restore an optimizer from a checkpoint of any layout.

    The function is collective over the default process group, if there is one.

    State tensors are created as the checkpoint lists them, on the parameters' devices. A state that
    was saved in the dtype of the tensor that the optimizer stepped on gets the dtype of today's;
    others keep their dtypes. If the former is unknown, all get it, as in torch. 0-d tensors, which
    are step counts, are created on the CPU unless the group is ``capturable`` or ``fused``.
    Hyperparameters are restored group by group, in order; ``foreach``, ``fused``, ``capturable``
    and ``differentiable`` are unchanged.

    Args:
        path: The checkpoint folder.
        optimizer: The optimizer to fill; its old state is dropped.
        names: Global name of every local parameter of the optimizer.
        placements: Placements of the parameters, by global name.
        groups: The saved groups of all ranks, from :func:`merge_groups`.
        index: Number of the optimizer among the module's optimizers.
        open_stored: Function from ``path`` to the stored tensors; by default it opens a checkpoint
            folder.

    Raises:
        CheckpointError: The groups do not fit, or the tensors cannot be loaded (see
            :func:`load_tensors`). If one rank fails, all ranks raise it, and the optimizer is
            unchanged.
    """
    with same_outcome(f"loading optimizer {index} from the checkpoint {path}"):
        named = _named(optimizer, names)
        _check_groups(optimizer, names, groups)
        stored = open_stored(path)
        states = _empty_states(stored.tensors, optimizer, named, placements, index)
    targets = {name: (value, place) for name, (_, _, value, place) in states.items()}
    load_tensors(path, targets, prefix=_prefix(index), open_stored=lambda _: stored)
    optimizer.state.clear()
    # An optimizer keeps its states in this order.
    order = {parameter: place for place, parameter in enumerate(named)}
    for parameter, key, value, _ in sorted(states.values(), key=lambda state: order[state[0]]):
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
    placements: Mapping[str, Placement],
    of_groups: Sequence[Sequence[str]],
) -> None:
    """Restore an optimizer in any layout from a ``state_dict`` of the whole model's optimizer.

    The function is collective like :func:`load_optimizer`.

    Args:
        state: The saved state.
        optimizer: The optimizer to fill.
        names: Global name of every local parameter of the optimizer.
        placements: Placements of the parameters, by global name.
        of_groups: Names of the saved parameters, group by group.

    Raises:
        CheckpointError: As for :func:`load_optimizer`.
    """
    with same_outcome("reading the optimizer's state"):
        stored, groups = _by_name(state, of_groups)
    load_optimizer(
        "in one file",
        optimizer,
        names=names,
        placements=placements,
        groups=groups,
        open_stored=lambda _: stored,
    )


def _by_name(
    state: Mapping[str, Any], names: Sequence[Sequence[str]]
) -> tuple[InMemory, list[dict[str, Any]]]:
    """Return the tensors of an optimizer's ``state_dict`` by parameter name, and its groups.

    The groups have the names of their parameters too.

    Args:
        state: Result of ``optimizer.state_dict()``.
        names: Names of the parameters of each group, in order.

    Raises:
        CheckpointError: The parameters do not match the names.
    """
    saved = state["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group) for group in names]:
        raise CheckpointError(
            f"the checkpoint's optimizer has groups of {[len(group['params']) for group in saved]} "
            f"parameters, but {[len(group) for group in names]} names"
        )
    by_index = {
        i: name
        for group, params in zip(saved, names, strict=True)
        for i, name in zip(group["params"], params, strict=True)
    }
    values: dict[str, Tensor] = {}
    for index, entries in state["state"].items():
        if not isinstance(entries, Mapping) or index not in by_index:
            raise CheckpointError(
                "the checkpoint's optimizer has states that belong to none of its parameters"
            )
        for key, value in entries.items():
            if value is None:
                continue
            key, value = _as_tensor(key, value)
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"the checkpoint's optimizer has the state {key!r} of {by_index[index]!r}, "
                    f"which is a {type(value).__name__}. Only numbers and tensors can be divided "
                    "among ranks"
                )
            values[f"{_prefix(0)}{key}/{by_index[index]}"] = value
    groups = [{**group, "params": list(params)} for group, params in zip(saved, names, strict=True)]
    return InMemory(values), groups


def _as_tensor(key: Any, value: Any) -> tuple[Any, Any]:
    """Return the key and the value of a state as they are stored: a number becomes a tensor."""
    if not isinstance(value, int | float):
        return key, value
    dtype = torch.float64 if isinstance(value, float) else None
    return key + _NUMBER, torch.tensor(value, dtype=dtype)


def _prefix(index: int) -> str:
    return f"optimizer/{index}/"


def _named(optimizer: Optimizer, names: Names) -> dict[Parameter, str]:
    """Return the optimizer's parameters with their names, in its order.

    Every state must belong to one of these parameters.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter not in names:
            raise CheckpointError(
                f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} "
                "that is not in the model"
            )
    parameter_ids = {id(parameter) for parameter in parameters}
    for key in optimizer.state:
        if id(key) not in parameter_ids:
            raise CheckpointError(
                f"{type(optimizer).__name__} has a state that belongs to none of its "
                f"parameters: {key!r:.80}"
            )
    return {parameter: names[parameter] for parameter in parameters}


def _empty_states(
    stored: Mapping[str, TensorEntry],
    optimizer: Optimizer,
    named: Names,
    placements: Mapping[str, Placement],
    index: int,
) -> dict[str, _EmptyState]:
    """Return parameter, state key, tensor to fill and position of this rank's stored states.

    The result is keyed by the names in the checkpoint.
    """
    parameters = {name: parameter for parameter, name in named.items()}
    on_device = {
        parameter
        for group in optimizer.param_groups
        if group.get("capturable") or group.get("fused")
        for parameter in group["params"]
    }
    states: dict[str, _EmptyState] = {}
    for full_name in sorted(name for name in stored if name.startswith(_prefix(index))):
        key, _, name = full_name.removeprefix(_prefix(index)).partition("/")
        if name not in parameters:
            continue
        parameter, placement, entry = parameters[name], placements[name], stored[full_name]
        # Like torch, tell a step count from a state of a parameter without dimensions by its name.
        scalar = entry.shape == () and (placement.full_shape != () or key == "step")
        place = placement
        if scalar or entry.shape != placement.full_shape:
            if not scalar and not _holds_all(placement):
                raise CheckpointError(
                    f"{key!r} of {name!r} has the shape {entry.shape} in the checkpoint, but "
                    f"{placement.full_shape} in the model"
                )
            place = Placement.replicated(entry.shape)
        device = parameter.device if parameter in on_device or not scalar else torch.device("cpu")
        stepped = stored.get(f"{_prefix(index)}{MASTER}/{name}", stored.get(MODEL + name))
        follows = (
            entry.dtype.is_floating_point
            and not scalar
            and (stepped is None or entry.dtype == stepped.dtype)
        )
        states[full_name] = (
            parameter,
            key,
            torch.zeros(
                place.held_shape,
                dtype=parameter.dtype if follows else entry.dtype,
                device=device,
            ),
            place,
        )
    return states


def _check_groups(optimizer: Optimizer, names: Names, groups: Sequence[Group]) -> None:
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, but the "
            f"checkpoint's has {len(groups)}"
        )
    group_index = {
        name: position for position, group in enumerate(groups) for name in group["params"]
    }
    for position, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names[parameter]
            # No rank of a sharded optimizer has a part of a parameter without elements.
            if parameter.numel() and group_index.get(name) != position:
                actual = f"in group {group_index[name]}" if name in group_index else "in no group"
                raise CheckpointError(
                    f"{name!r} is in parameter group {position} of this optimizer, but {actual} "
                    "of the checkpoint's. Configure the same groups, or load only the weights "
                    "(InitFrom)"
                )


def _restore_group(group: Group, saved: Group) -> None:
    for key, value in saved.items():
        if key == "params" or key in _IMPLEMENTATION:
            continue
        current = group.get(key)
        # A captured or compiled step reads this very tensor.
        if isinstance(current, Tensor):
            current.fill_(value)
        else:
            group[key] = (
                value.item() if isinstance(current, float) and isinstance(value, Tensor) else value
            )


def _equal(left: object, right: object) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    has_tensor = isinstance(left, Tensor) or isinstance(right, Tensor)
    return not has_tensor and bool(left == right)


def _holds_all(placement: Placement) -> bool:
    return placement.is_full and placement.flat is None
