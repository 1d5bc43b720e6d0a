"""What becomes of the whole model before it is cut: plugins may put other modules and parameters into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_ptdp._lightning import LightningNames, layer_sync
from lightning_ptdp.mesh import ProcessMesh

__all__ = ["convert", "replacing"]


def replacing(plugin: Any, names: LightningNames) -> Callable[[nn.Module], nn.Module] | None:
    """The precision plugin's ``convert_module`` if it may do more than change dtypes."""
    method: Callable[[nn.Module], nn.Module] = plugin.convert_module
    return None if type(plugin).convert_module in names.casting else method


def convert(strategy: Any, mesh: ProcessMesh) -> Any:
    """Convert the strategy's model, in place where its plugins do."""
    model = strategy.precision_plugin.convert_module(strategy.model)
    replicas = mesh.group("replica_sum")
    if layer_sync(strategy) is not None and replicas.size > 1:
        # The world's group, where it is that, can be copied with the model.
        group = replicas.handle if replicas.size < mesh.layout.world_size else None
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    return model
