"""What can be asked of a module without its tensors: models inspect their layers (``layers[0].self_attn.batch_first``)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

__all__ = ["plain_attributes"]


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Its public attributes that are neither parameters nor buffers; children as namespaces of the same."""
    plain = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    children = {key: SimpleNamespace(**plain_attributes(child)) for key, child in module._modules.items() if child is not None}
    return {**children, **plain}
