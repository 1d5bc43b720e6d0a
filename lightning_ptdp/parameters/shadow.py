"""Copies of a model's structure without its tensors, to run its own code at no cost."""

from __future__ import annotations

from torch import Tensor, nn


def without_tensors(model: nn.Module) -> nn.Module:
    """Return a copy whose tensors are on the meta device, without hooks and not compiled.

    The model is not changed. Shared modules and parameters stay shared. Plain attributes are the
    same objects as the model's."""
    return _copy(model, {}, {})


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a module with the same attributes.

    ``copy.copy()`` is not used, because some modules refuse it, such as parametrized ones."""
    copied = type(module).__new__(type(module))
    copied.__dict__.update(module.__dict__)
    return copied


def _copy(
    module: nn.Module, modules: dict[int, nn.Module], tensors: dict[int, Tensor]
) -> nn.Module:
    if id(module) in modules:
        return modules[id(module)]
    shadow = modules[id(module)] = shallow_copy(module)
    fields = shadow.__dict__
    fields["_parameters"] = {
        key: None
        if p is None
        else tensors.setdefault(id(p), nn.Parameter(p.detach().to("meta"), p.requires_grad))
        for key, p in module._parameters.items()
    }
    fields["_buffers"] = {
        key: None if b is None else b.detach().to("meta") for key, b in module._buffers.items()
    }
    fields["_modules"] = {
        key: None if child is None else _copy(child, modules, tensors)
        for key, child in module._modules.items()
    }
    fields.update({key: value for key, value in vars(nn.Module()).items() if "_hooks" in key})
    fields.pop("_compiled_call_impl", None)  # it would call the model itself
    return shadow
