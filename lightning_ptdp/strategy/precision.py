"""Lightning's precision plugins: conversion of the model, and one loss scale for all ranks.

An overflow may occur on a single rank: the one with the affected stage, slice of a matrix or shard
of the gradients. Its scaler alone would then skip the step, while the other ranks make it. The
overflow flags are therefore maximized over the world before they are used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptdp.parameters.materialize import Materializer
from lightning_ptdp.shims.lightning import LightningModule, Precision, layer_sync
from lightning_ptdp.shims.torch import found_inf, unscale_before_step
from lightning_ptdp.strategy.world import World

_INITIAL_SCALE = 2.0**12
"""Initial loss scale of "16-true".

There the loss is in float16 too, whose largest number is 65504. torch's default of 2^16 would
overflow in every first step."""


def prepare_loss_scaling(strategy: World) -> None:
    """Let all ranks agree on a scaler's decisions, and give "16-true" a dynamic loss scale.

    Any optimizer's gradients are unscaled before its step, and so can be clipped.

    Lightning's plugin for "16-true" has no loss scale. The optimizers must step on gradients in
    float32: their parameters, or the masters of these, must be in float32.

    Raises:
        ValueError: The scaler is disabled, so that small gradients would silently vanish.
    """
    plugin = strategy.precision_plugin
    device = strategy.root_device
    if getattr(plugin, "precision", None) == "16-true" and getattr(plugin, "scaler", None) is None:
        plugin.scaler = torch.amp.GradScaler(device.type, init_scale=_INITIAL_SCALE)
        plugin.pre_backward = partial(_pre_backward, plugin, plugin.pre_backward)
        # In the order of "16-mixed": backward, unscale, hooks and clipping, then the step unless a
        # gradient overflowed.
        plugin.optimizer_step = partial(strategy._names.MixedPrecision.optimizer_step, plugin)
        plugin.state_dict = plugin.scaler.state_dict
        plugin.load_state_dict = plugin.scaler.load_state_dict
    for optimizer in strategy.optimizers:
        # Otherwise clipping and the other ranks would not see that. Lightning would refuse to clip
        # the gradients of a fused optimizer, even where nothing is scaled.
        unscale_before_step(optimizer)
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return
    if not scaler.is_enabled():
        raise ValueError(
            f"precision={plugin.precision!r} has a GradScaler that is not enabled on "
            f"{device.type}, so gradients below 6e-8 would become zero. Enable it, or use "
            "precision='bf16-mixed', 'bf16-true' or '32-true'"
        )
    if not isinstance(scaler.unscale_, partial):
        scaler.unscale_ = partial(_unscale_together, scaler, scaler.unscale_, device)


def loss_scale(plugin: Precision, device: torch.device) -> Tensor | float:
    """Return the factor of the losses, () on the device; 1 without a scaler."""
    scaler = getattr(plugin, "scaler", None)
    return 1.0 if scaler is None else scaler.scale(torch.ones((), device=device))


def _unscale_together(
    scaler: torch.amp.GradScaler,
    unscale: Callable[[Optimizer], None],
    device: torch.device,
    optimizer: Optimizer,
) -> None:
    unscale(optimizer)
    overflow = found_inf(scaler, optimizer, device)
    if dist.is_initialized():
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)


def _pre_backward(
    plugin: Precision, plain: Callable[..., Tensor], tensor: Tensor, module: LightningModule
) -> Tensor:
    return plain(plugin.scaler.scale(tensor), module)


# ---- Conversion of the whole model by Lightning's plugins, before it is cut ----------------------
#
# Plugins may replace modules and parameters.


def replacing(strategy: World) -> Callable[[nn.Module], nn.Module] | None:
    """Return the plugin's ``convert_module`` if it may do more than change dtypes."""
    plugin = strategy.precision_plugin
    casts = type(plugin).convert_module in strategy._names.casting
    return None if casts else plugin.convert_module


def convert(strategy: World) -> nn.Module:
    """Convert the strategy's model, in place if its plugins do so.

    A plugin that replaces modules may copy values, but a model built by ``configure_model`` has no
    values yet. They are therefore filled in first if every rank holds the whole model anyway."""
    if replacing(strategy) is not None and strategy.layout.size("shards") == 1:
        give_value = Materializer(
            strategy.model, seed=strategy.run.seed, device=torch.device("cpu")
        )
        for name, module in strategy.model.named_modules():
            give_value(module, name)
    model = strategy.precision_plugin.convert_module(strategy.model)
    replicas = strategy.mesh.group("replica_sum")
    if layer_sync(strategy) is not None and replicas.size > 1:
        # A handle prevents copying of the model. The world's group works without one.
        group = replicas.handle if replicas.size < strategy.layout.world_size else None
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    return model
