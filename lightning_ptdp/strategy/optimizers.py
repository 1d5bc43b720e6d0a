"""Parameter groups of the uncut model on ranks that hold parts of it.

``configure_optimizers`` runs on a view of the whole module. Groups, their options and their order
are therefore the same as in one process. Parameters that this rank does not hold are removed from
the groups afterwards. An empty group is kept, because learning rate schedulers and checkpoints
identify groups by position."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.checkpoint.save_agreement import gather
from lightning_ptdp.data_parallel import Cut, GroupTrial, constructed_state
from lightning_ptdp.parameters.managed_parameter import ManagedParameters
from lightning_ptdp.parameters.placement import Placement, slice_full
from lightning_ptdp.parameters.structure_copies import successor
from lightning_ptdp.strategy.world import World
from lightning_ptdp.world.layout import ParallelLayout

Description = dict[str, object]
"""One group: its options by name, and in ``"params"`` its parameters' uncut names."""


class OptimizerGroupsError(PTDPError, ValueError):
    """Error of ranks that have made different parameter groups."""


def renew_parameters(optimizer: Optimizer, by_name: Mapping[str, nn.Parameter]) -> None:
    """Give an optimizer that was created before fit, as LightningCLI does, this rank's parameters.

    Args:
        optimizer: The optimizer, changed in place.
        by_name: This rank's parameters, and the stand-ins for those of others.
    """
    for group in optimizer.param_groups:
        for index, old in enumerate(group["params"]):
            new = group["params"][index] = successor(old, by_name)
            if new is not old and old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)


def settle_groups(strategy: World, foreign: Mapping[nn.Parameter, str]) -> list[list[GroupTrial]]:
    """Remove parameters of other stages from the groups, and compare the groups of all ranks.

    Collective over the world.

    Args:
        strategy: The strategy, with the optimizers that ``configure_optimizers`` made of the uncut
            module.
        foreign: Parameters that this rank does not hold, and their names.

    Returns:
        How the layout cuts the members of each group, by optimizer.

    Raises:
        OptimizerGroupsError: The groups of the ranks differ; the same on all ranks.
        ValueError: An optimizer has a parameter that is not in the model.
    """
    optimizers = strategy.optimizers
    parameters = strategy.parallel.parameters
    names = {**{p: managed.name for p, managed in parameters.items()}, **foreign}
    descriptions = [_describe_groups(optimizer, names) for optimizer in optimizers]
    trials = [_make_trials(optimizer, foreign, strategy) for optimizer in optimizers]
    for optimizer in optimizers:
        _drop_foreign(optimizer, foreign, parameters)
        if strategy.layout.world_size > 1 or strategy.config.runs_backward:
            _check_held(optimizer, parameters)
    if strategy.layout.world_size == 1:
        return trials
    return _compare_groups(optimizers, descriptions, trials)


def _check_held(optimizer: Optimizer, parameters: ManagedParameters) -> None:
    """Check that all parameters of the optimizer have been distributed over the ranks.

    Raises:
        ValueError: A parameter has not. It would never change, or would change differently on each
            replica.
    """
    members = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    unknown = next((parameter for parameter in members if parameter not in parameters), None)
    if unknown is not None:
        raise ValueError(
            f"{type(optimizer).__name__} has a parameter of shape {tuple(unknown.shape)} that "
            "is not in the model of this rank. Create the optimizer in configure_optimizers, "
            "from self.parameters(), and not before fit. A loss with parameters must be an "
            "attribute of the LightningModule"
        )


def _describe_groups(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[Description]:
    """Return descriptions of the groups, without parameters that have no name."""
    return [
        {
            **{
                key: _plain(value)
                for key, value in group.items()
                if key not in ("params", "param_names")
            },
            "params": [names[parameter] for parameter in group["params"] if parameter in names],
        }
        for group in optimizer.param_groups
    ]


def _drop_foreign(
    optimizer: Optimizer, foreign: Mapping[nn.Parameter, str], parameters: ManagedParameters
) -> None:
    """Remove parameters of other stages from the groups, in place.

    Optimizer states of the full shape are cut to this rank's part."""
    for group in optimizer.param_groups:
        indices = [
            index for index, parameter in enumerate(group["params"]) if parameter not in foreign
        ]
        for key in ("params", "param_names"):
            if key in group:
                group[key][:] = [group[key][index] for index in indices]
    for parameter in foreign:
        optimizer.state.pop(parameter, None)
    for parameter, managed in parameters.items():
        full_shape = managed.placement.full_shape
        local_shape = managed.placement.local_shape
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == full_shape != local_shape:
                state[key] = slice_full(value, managed.placement)


def _make_trials(
    optimizer: Optimizer, foreign: Mapping[nn.Parameter, str], strategy: World
) -> list[GroupTrial]:
    """Return how the layout splits the parameters of each group.

    Call it before the parameters of other stages are dropped."""
    config = strategy.config
    layout = strategy.layout
    parameters = strategy.parallel.parameters
    trials = []
    for group in optimizer.param_groups:
        dims = frozenset(p.dim() for p in group["params"] if p in foreign or p in parameters)
        cuts = {
            cut
            for p in group["params"]
            if p in parameters
            for cut in _cuts(parameters[p].placement, layout)
        }
        if dims and layout.pipeline_parallel_size > 1:
            cuts.add(
                Cut(
                    option=f"pipeline_parallel_size={layout.pipeline_parallel_size}",
                    dims=max(dims),
                    along="apart",
                )
            )
        if dims and config.sharded_state(layout) != "none":
            cuts.add(Cut(option=f"shard={config.shard!r}", dims=max(*dims, 1), along="flat"))
        trials.append(
            GroupTrial(cuts=frozenset(cuts), dims=dims, state=constructed_state(optimizer, group))
        )
    return trials


def _cuts(placement: Placement, layout: ParallelLayout) -> Iterator[Cut]:
    axes = [axis for axis in placement.sharded if axis != "pipeline" and layout.size(axis) > 1]
    for piece in placement.pieces if axes else ():
        for dim, (size, full) in enumerate(zip(piece.size, placement.full_shape, strict=True)):
            if size != full:
                option = f"{axes[0]}_parallel_size={layout.size(axes[0])}"
                yield Cut(option=option, dims=len(placement.full_shape), along=dim)


def _compare_groups(
    optimizers: Sequence[Optimizer],
    descriptions: Sequence[Sequence[Description]],
    trials: Sequence[Sequence[GroupTrial]],
) -> list[list[GroupTrial]]:
    """Check that all ranks made the same groups, and merge their trials.

    Collective over the world.

    Raises:
        OptimizerGroupsError: The groups differ. Names the first difference, on all ranks.
    """
    ranks = gather(([[_digest(group) for group in groups] for groups in descriptions], trials))
    peer = next((rank for rank, (digests, _) in enumerate(ranks) if digests != ranks[0][0]), None)
    if peer is None:
        return [
            [_united(group_trials) for group_trials in zip(*groups, strict=True)]
            for groups in zip(*(trials for _, trials in ranks), strict=True)
        ]
    gathered = gather(descriptions)
    for optimizer, left, right in zip(optimizers, gathered[0], gathered[peer], strict=True):
        name = type(optimizer).__name__
        if len(left) != len(right):
            raise _refusal(
                f"{name} has {len(left)} parameter groups on rank 0, but {len(right)} on rank "
                f"{peer}"
            )
        for position, (group, peer_group) in enumerate(zip(left, right, strict=True)):
            if difference := _difference(group, peer_group, peer):
                raise _refusal(f"parameter group {position} of {name} has {difference}")
    raise AssertionError("digests differ, but their contents do not")


def _united(trials: Sequence[GroupTrial]) -> GroupTrial:
    return GroupTrial(
        cuts=frozenset(cut for trial in trials for cut in trial.cuts),
        dims=frozenset(dim for trial in trials for dim in trial.dims),
        state=next((trial.state for trial in trials if trial.state is not None), None),
    )


def _difference(group: Description, peer_group: Description, peer: int) -> str:
    for key in sorted((group.keys() | peer_group.keys()) - {"params"}):
        if group.get(key) != peer_group.get(key):
            return f"{key}={group.get(key)} on rank 0, but {peer_group.get(key)} on rank {peer}"
    names: Any = group["params"]
    peer_names: Any = peer_group["params"]
    if missing := [name for name in names if name not in peer_names]:
        return f"'{missing[0]}' on rank 0, but not on rank {peer}"
    if missing := [name for name in peer_names if name not in names]:
        return f"'{missing[0]}' on rank {peer}, but not on rank 0"
    if names != peer_names:
        return f"its parameters in another order on rank {peer} than on rank 0"
    return ""


def _refusal(reason: str) -> OptimizerGroupsError:
    return OptimizerGroupsError(
        f"{reason}. All ranks must train with the same groups. In configure_optimizers, groups "
        "and options must depend only on names, shapes or positions of parameters, not on the "
        "rank, on random numbers or on the order of a set"
    )


def _digest(group: Description) -> str:
    return hashlib.sha256(repr(sorted(group.items())).encode()).hexdigest()


def _plain(value: object) -> object:
    """Return a value that can be compared between ranks; for an object, its type."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else type(value).__qualname__
