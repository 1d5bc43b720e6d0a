"""A copy of a model's structure without its tensors, to ask the model's own code questions at no
cost."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["shallow_copy", "without_tensors"]


def without_tensors(model: nn.Module) -> nn.Module:
    """A copy whose tensors are on the meta device, without hooks and not compiled; the model is not
    changed.

    Modules and parameters that are shared stay shared; plain attributes are the very objects of the
    model."""
    return _copy(model, {}, {})


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module with the same attributes. Not ``copy.copy()``, which modules may refuse, as
    parametrized ones do."""
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
    fields.pop("_compiled_call_impl", None)  # which would call the model itself
    return shadow
