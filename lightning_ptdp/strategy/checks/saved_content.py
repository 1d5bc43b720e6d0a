"""Checks of a checkpoint's content, before the first checkpoint is written."""

from __future__ import annotations

import warnings
from collections.abc import Container, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ptdp.base.forked_processes import try_in_child
from lightning_ptdp.checkpoint import CheckpointError, left_out, optimizer_tensors
from lightning_ptdp.data_parallel import GroupTrial
from lightning_ptdp.data_parallel.elementwise import equivalent_optimizer
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.shims.lightning import LightningModule

_PLAIN = (bool, int, float, str, tuple, type(None))
_SIDE = 4
_REMEDY = (
    "Use an optimizer whose states are like its parameters (AdamW, SGD, RMSprop, ...), or "
    "Trainer(enable_checkpointing=False)"
)


def warn_of_objects(owner: object) -> None:
    """Warn of hyperparameters of a module or data module that are objects.

    Loading a checkpoint does not restore them unless the checkpoint is trusted."""
    objects = left_out(getattr(owner, "hparams", None) or {})
    if not objects:
        return
    names = ", ".join(
        f"{key!r} (a {kind})" if key else f"all of them (a {kind})" for key, kind in objects.items()
    )
    warnings.warn(
        f"hyperparameters of {type(owner).__name__} are objects and will not be restored from "
        f"checkpoints, because nothing in a checkpoint is unpickled: {names}. Pass them to "
        "load_from_checkpoint, or use weights_only=False, which trusts the checkpoint",
        stacklevel=2,
    )


def check_save_hook(module: LightningModule) -> None:
    """Check what ``on_save_checkpoint`` adds to a checkpoint, by a call in a forked process.

    Raises:
        ValueError: It adds an object, which could not be read back.
    """

    def trial() -> ValueError | None:
        content = {"epoch": 0, "global_step": 0, "state_dict": module.state_dict()}
        old_keys = set(content)
        module.on_save_checkpoint(content)
        added = {key: value for key, value in content.items() if key not in old_keys}
        for key, kind in left_out(added).items():
            return ValueError(
                f"on_save_checkpoint of {type(module).__name__} adds {key!r} (a {kind}), which "
                "cannot be restored without executing code. Add plain values or tensors, or use "
                "Trainer(enable_checkpointing=False)"
            )
        return None

    try_in_child(trial)


def check_extra_state(module: nn.Module) -> None:
    """Check the entries that modules add to their ``state_dict`` by ``get_extra_state``.

    Raises:
        ValueError: An entry is not a tensor; names the module.
    """
    for name, submodule in module.named_modules():
        if type(submodule).get_extra_state is nn.Module.get_extra_state:
            continue
        if not isinstance(extra := submodule.get_extra_state(), torch.Tensor):
            raise ValueError(
                f"get_extra_state() of '{name}' ({type(submodule).__name__}) returns a "
                f"{type(extra).__name__}, but only tensors are saved by layout. Return a "
                "tensor, save the value in on_save_checkpoint and on_load_checkpoint, or use "
                "Trainer(enable_checkpointing=False)"
            )


def check_optimizer_state(
    optimizer: Optimizer,
    trials: Sequence[GroupTrial],
    *,
    whole: Container[int],
    device: torch.device,
) -> None:
    """Check that an optimizer's states can be stored by name, by a step on a small tensor.

    torch's own optimizers are known. Optimizers that keep other objects, or that call hooks, are
    not tried; for them the first save shows the error.

    Args:
        optimizer: The optimizer.
        trials: Facts about its groups.
        whole: Positions of the groups whose parameters are not cut for its step.
        device: Device of the tensors.

    Raises:
        ValueError: The states cannot be stored; names the optimizer and the state.
    """
    if not _may_be_tried(optimizer):
        return
    for position, (group, trial) in enumerate(zip(optimizer.param_groups, trials, strict=True)):
        shape = (_SIDE, _SIDE) if any(dims > 1 for dims in trial.dims) else (_SIDE,)
        weight = nn.Parameter(torch.ones(shape, device=device))
        weight.grad = torch.ones_like(weight)
        probe = equivalent_optimizer(optimizer, group, [weight])
        try:
            probe.step()
        except Exception:
            return  # the optimizer needs more than a parameter and its gradient
        place = Placement.replicated(shape)
        if trial.cuts and position not in whole:
            place = place.flattened(0, _SIDE)
        try:
            optimizer_tensors(probe, names={weight: "weight"}, placements={"weight": place})
        except CheckpointError as error:
            raise ValueError(f"{error}. {_REMEDY}") from None


def _may_be_tried(optimizer: Optimizer) -> bool:
    if type(optimizer).__module__.startswith("torch.optim.") and not isinstance(
        optimizer, torch.optim.Adafactor
    ):
        return False
    usual = vars(torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.0)).keys() | {"step"}
    hooks = (value for key, value in vars(optimizer).items() if key.endswith("_hooks"))
    return not any(hooks) and all(
        isinstance(value, _PLAIN) for key, value in vars(optimizer).items() if key not in usual
    )
