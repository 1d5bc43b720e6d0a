"""Copies of a model's structure: without tensors, or uncut on a rank that holds a part.

A copy without tensors runs the model's own code at no cost.

The uncut view is for ``configure_optimizers``. If a module is on another pipeline stage, or has
been replaced, the tree contains a shell of it: an object of its type with its attributes and no
memory. A shell holds this rank's parameters, and empty stand-ins for the parameters of other ranks.
All parameters report their shapes in the uncut model::

    self.model.h        block 0 (shell, stand-ins)    block 1 (shell, stand-ins)    block 2    block 3
    rank 1 of 2         numel() of the uncut model    numel() of the uncut model    here       here
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.base.partial_values import PartialModelError, PartialValues
from lightning_ptdp.base.torch_calls import TorchCall
from lightning_ptdp.parameters.managed_parameter import ManagedParameters


def without_tensors(model: nn.Module) -> nn.Module:
    """Return a copy whose tensors are on the meta device, without hooks and not compiled.

    The model is not changed. Shared modules and parameters stay shared. Among plain attributes,
    tensors, modules and containers of these are copied, because a forward may leave state in them.
    All other attributes are the same objects as in the model.
    """
    return _copy(model, {})


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a module with the same attributes.

    ``copy.copy()`` is not used, because some modules refuse it, such as parametrized ones.
    """
    copied = type(module).__new__(type(module))
    copied.__dict__.update(module.__dict__)
    return copied


def _copy(value: Any, copies: dict[int, Any]) -> Any:
    """Return the copy of one value; ``copies`` has those that exist, by identity."""
    key = id(value)
    if key in copies:
        return copies[key]
    if isinstance(value, nn.Module):
        copies[key] = copied = shallow_copy(value)
        _fill(copied, copies)
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


def _fill(copied: nn.Module, copies: dict[int, Any]) -> None:
    usual = vars(nn.Module())
    fields = copied.__dict__
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


# ---- Uncut view of a model ---------------------------------------------------------------------


_MARK = "_ptdp_uncut_name"
"""Attribute that marks the uncut model's parameters, which an earlier optimizer may still have."""


class UncutView:
    """Structure of a module before it is cut.

    Args:
        module: The uncut module.
        names: First name under which each parameter is registered.
    """

    def __init__(self, module: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
        self._module = module
        # torch.utils.swap_tensors refuses parameters with weak references. A copy of a parameter
        # has the mark, too, but another id.
        for parameter, name in names.items():
            vars(parameter)[_MARK] = (id(parameter), name)
        self._twins = {name: _twin(parameter) for parameter, name in names.items()}
        self._holders: list[tuple[dict[str, nn.Parameter | None], str, str]] = []
        shells: dict[nn.Module, nn.Module] = {}
        self._children = {
            key: self._shell(child, names, shells) for key, child in module.named_children()
        }

    @contextlib.contextmanager
    def inserted(
        self, local: ManagedParameters, *, trained: Mapping[str, bool], device: torch.device
    ) -> Iterator[tuple[dict[nn.Parameter, str], dict[str, nn.Parameter]]]:
        """Make the module look uncut inside the context.

        Yields the stand-ins with their names, and all parameters by name.

        Args:
            local: The local parameters.
            trained: Current ``requires_grad`` of parameters by name, which replaces the value at
                the time of the cut.
            device: Device of this rank and of the stand-ins.
        """
        by_name = {managed.name: parameter for parameter, managed in local.items()}
        absent = {
            name: _stand_in(twin, trained, name, device)
            for name, twin in self._twins.items()
            if name not in by_name
        }
        by_name.update(absent)
        for parameters, key, name in self._holders:
            parameters[key] = by_name[name]
        swapped = list(_replaced(self._module, self._children))
        for modules, key, _, shell in swapped:
            modules[key] = shell
        views: dict[Tensor, tuple[str, Tensor]] = {
            by_name[name]: (name, twin)
            for name, twin in self._twins.items()
            if twin.shape != by_name[name].shape
        }
        try:
            with _FullShapes(views):
                yield {parameter: name for name, parameter in absent.items()}, by_name
        finally:
            for modules, key, module, _ in swapped:
                modules[key] = module
            for parameters, key, _ in self._holders:
                parameters[key] = None

    def _shell(
        self,
        module: nn.Module,
        names: Mapping[nn.Parameter, str],
        shells: dict[nn.Module, nn.Module],
    ) -> nn.Module:
        if module in shells:
            return shells[module]
        shell = shells[module] = object.__new__(type(module))
        vars(shell).update(
            {key: value for key, value in vars(module).items() if not isinstance(value, Tensor)}
        )
        parameters = dict.fromkeys(module._parameters)
        self._holders += [
            (parameters, key, names[p]) for key, p in module._parameters.items() if p is not None
        ]
        children = {
            key: None if child is None else self._shell(child, names, shells)
            for key, child in module._modules.items()
        }
        vars(shell).update(
            _parameters=parameters, _buffers=dict.fromkeys(module._buffers), _modules=children
        )
        return shell


def successor(parameter: nn.Parameter, by_name: Mapping[str, nn.Parameter]) -> nn.Parameter:
    """Return the parameter that has replaced one of the uncut model, or any other as it is."""
    owner, name = vars(parameter).get(_MARK, (0, ""))
    return by_name.get(name, parameter) if owner == id(parameter) else parameter


def _replaced(
    module: nn.Module, shells: Mapping[str, nn.Module | None]
) -> Iterator[tuple[dict[str, nn.Module | None], str, nn.Module, nn.Module]]:
    """Yield (children of the parent, key, module, shell) of the replaced modules.

    A module is replaced if it is no longer the one of the uncut model.
    """
    for key, child in module._modules.items():
        shell = shells.get(key)
        if child is None or shell is None:
            continue
        if type(child) is not type(shell):
            yield module._modules, key, child, shell
        else:
            yield from _replaced(child, shell._modules)


def _twin(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same shape, without memory."""
    twin = nn.Parameter(
        torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad
    )
    vars(twin).update(vars(parameter))
    return twin


def _stand_in(
    twin: nn.Parameter, trained: Mapping[str, bool], name: str, device: torch.device
) -> nn.Parameter:
    values = torch.empty((0,) * twin.dim(), dtype=twin.dtype, device=device)
    parameter = nn.Parameter(values, trained.get(name, twin.requires_grad))
    vars(parameter).update(vars(twin))
    return parameter


_Asks: Any = Tensor
_SHAPES: frozenset[Callable[..., object]] = frozenset(
    [
        *(_Asks.shape.__get__, _Asks.ndim.__get__, _Asks.nbytes.__get__),
        *(
            _Asks.size,
            _Asks.dim,
            _Asks.ndimension,
            _Asks.numel,
            _Asks.nelement,
            _Asks.__len__,
            torch.numel,
        ),
    ]
)


class _FullShapes(PartialValues):
    """Mode that answers questions about shapes from the uncut model.

    Args:
        views: By parameter, its name and a tensor of its shape in the uncut model.
    """

    def __init__(self, views: Mapping[Tensor, tuple[str, Tensor]]) -> None:
        super().__init__(_refusal)
        self._names.update({parameter: name for parameter, (name, _) in views.items()})
        self._twins = {parameter: twin for parameter, (_, twin) in views.items()}

    def observe_call(self, call: TorchCall) -> Any:
        """Run a call and check its result; shapes are those of the twins."""
        asks = call.function in _SHAPES and isinstance(call.first, Tensor)
        twin = self._twins.get(call.first) if asks else None
        if twin is not None:
            return call.function(twin, *call.others, **call.kwargs)
        return super().observe_call(call)

    def _follow(self, call: TorchCall, parts: list[Tensor], result: Tensor) -> Tensor:
        source = super()._follow(call, parts, result)
        if source in self._twins and source.shape == result.shape:
            self._twins[result] = self._twins[source]
        return source


def _refusal(name: str, function: str) -> PartialModelError:
    return PartialModelError(
        f"configure_optimizers computes a number from the values of '{name}' ({function}), but "
        "under tensor and pipeline parallelism a rank has only a shard of them or none. Use "
        "names, shapes or positions of parameters, compute the number before fit, or use "
        "tensor_parallel_size=1 and pipeline_parallel_size=1"
    )
