"""Conversion of the whole model by Lightning's plugins, before it is cut.

Plugins may replace modules and parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lightning_ptdp.parameters.materialize import Materializer
from lightning_ptdp.shims.lightning import LightningNames, Precision, layer_sync
from lightning_ptdp.strategy.model_space import ModelSpace
from lightning_ptdp.world.mesh import ProcessMesh

__all__ = ["convert", "replacing"]


def replacing(plugin: Precision, names: LightningNames) -> Callable[[nn.Module], nn.Module] | None:
    """Return the plugin's ``convert_module`` if it may do more than change dtypes."""
    method: Callable[[nn.Module], nn.Module] = plugin.convert_module
    return None if type(plugin).convert_module in names.casting else method


def convert(strategy: ModelSpace, mesh: ProcessMesh) -> nn.Module:
    """Convert the strategy's model, in place if its plugins do so.

    A plugin that replaces modules may copy values, but a model built by ``configure_model`` has no
    values yet. They are therefore filled in first if every rank holds the whole model anyway."""
    if (
        replacing(strategy.precision_plugin, strategy._names) is not None
        and strategy.ranks_hold_all
    ):
        give_value = Materializer(
            strategy.model, seed=strategy.run.seed, device=torch.device("cpu")
        )
        for name, module in strategy.model.named_modules():
            give_value(module, name)
    model = strategy.precision_plugin.convert_module(strategy.model)
    replicas = mesh.group("replica_sum")
    if layer_sync(strategy) is not None and replicas.size > 1:
        # A handle prevents copying of the model. The world's group works without one.
        group = replicas.handle if replicas.size < mesh.layout.world_size else None
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    return model
