"""Copies of a model's structure without its tensors, to run its own code at no cost."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def without_tensors(model: nn.Module) -> nn.Module:
    """Return a copy whose tensors are on the meta device, without hooks and not compiled.

    The model is not changed. Shared modules and parameters stay shared. Among plain attributes,
    tensors, modules and containers of these are copied, because a forward may leave state in them.
    All other attributes are the same objects as in the model."""
    copy: nn.Module = _copy(model, {})
    return copy


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a module with the same attributes.

    ``copy.copy()`` is not used, because some modules refuse it, such as parametrized ones."""
    copied = type(module).__new__(type(module))
    copied.__dict__.update(module.__dict__)
    return copied


def _copy(value: Any, copies: dict[int, Any]) -> Any:
    """Return the copy of one value; ``copies`` has those that exist, by identity."""
    key = id(value)
    if key in copies:
        return copies[key]
    if isinstance(value, nn.Module):
        copies[key] = shadow = shallow_copy(value)
        _fill(shadow, copies)
    elif isinstance(value, nn.Parameter):
        copies[key] = nn.Parameter(value.detach().to("meta"), value.requires_grad)
    elif isinstance(value, Tensor):
        copies[key] = value.detach().clone()
    elif type(value) is dict:
        copies[key] = {}
        copies[key].update({name: _copy(one, copies) for name, one in value.items()})
    elif type(value) is list:
        copies[key] = []
        copies[key].extend(_copy(one, copies) for one in value)
    elif type(value) in (tuple, set):
        copies[key] = type(value)(_copy(one, copies) for one in value)
    else:
        return value
    return copies[key]


def _fill(shadow: nn.Module, copies: dict[int, Any]) -> None:
    usual = vars(nn.Module())
    fields = shadow.__dict__
    for key in ("_parameters", "_modules"):
        fields[key] = {name: _copy(value, copies) for name, value in fields[key].items()}
    fields["_buffers"] = {
        name: None if buffer is None else buffer.detach().to("meta")
        for name, buffer in fields["_buffers"].items()
    }
    for key, value in fields.items():
        if "_hooks" in key and key in usual:
            fields[key] = usual[key]
        elif key not in usual:
            fields[key] = _copy(value, copies)
    fields.pop("_compiled_call_impl", None)  # it would call the model itself
