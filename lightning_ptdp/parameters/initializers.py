"""Initializers of a module's values.

The initializers of a module are its own reset method, the ``_init_weights`` of its model, and the
modules around it. A Hugging Face model is initialized as a whole: it calls its initializer on every
module, from the leaves up. A module may set weights of its children (GPT-2's attention scales its
output projection). To do the same for a single leaf, the leaf gets real tensors inside a copy of
the model without tensors. The initializers then have no effect on the other modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.parameters.structure_copies import shallow_copy, without_tensors
from lightning_ptdp.shims.peft import adapter_initializer

_HALF = (torch.bfloat16, torch.float16)


class Initializers:
    """Initializer for the modules of a model, one at a time.

    Args:
        model: The whole, uncut model; not changed, and not kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._copy = without_tensors(model)

    def __call__(self, name: str, *, others: Collection[str] = ()) -> nn.Module | None:
        """Return a copy of the module ``name`` with initial values, at full size, on the CPU.

        Only the module's own tensors get values. Random numbers come from torch's generator. The
        result is None if no initializer of the module is known.

        Args:
            name: Global name of the module.
            others: Its tied parameters that another module initializes. An example is the weight of
                a decoder that is tied to the embedding but has its own bias.

        Raises:
            ValueError: The initializers did not set a tensor.
        """
        chain = self._chain(name)
        module = chain[-1]
        owner, resets = self._initializer_of(chain)
        if owner is None and not resets:
            return None
        originals = dict(module._parameters), dict(module._buffers)
        with torch.no_grad():
            for mapping in (module._parameters, module._buffers):
                mapping.update(
                    {key: _unset(tensor) for key, tensor in mapping.items() if tensor is not None}
                )
            try:
                for reset in resets:
                    reset()
                if owner is not None:
                    initialize = owner._init_weights
                    for member in reversed(chain[chain.index(owner) :]):
                        initialize(member)
                _check_set(module, name, others)
                result = shallow_copy(module)
                for kind, before in zip(("_parameters", "_buffers"), originals, strict=True):
                    drawn = getattr(module, kind)
                    result.__dict__[kind] = {
                        key: _in_dtype_of(drawn[key], before.get(key)) for key in drawn
                    }
            finally:
                module.__dict__["_parameters"], module.__dict__["_buffers"] = originals
        return result

    def knows(self, name: str) -> bool:
        """Return True if an initializer of the module is known."""
        owner, resets = self._initializer_of(self._chain(name))
        return owner is not None or bool(resets)

    def _initializer_of(self, chain: list[Any]) -> tuple[Any, list[Callable[[], object]]]:
        """Return the initializing model of the chain's last module, and earlier initializers."""
        adapter = adapter_initializer(chain)
        return (None, [adapter]) if adapter is not None else (self._owner(chain), _resets(chain))

    def _chain(self, name: str) -> list[Any]:
        """Return the modules from the root down to ``name``."""
        chain: list[Any] = [self._copy]
        for step in name.split(".") if name else ():
            chain.append(chain[-1]._modules[step])
        return chain

    def _owner(self, chain: list[Any]) -> Any:
        """Return the nearest module at or above the last whose ``_init_weights`` takes a module."""
        return next(
            (
                module
                for module in reversed(chain)
                if _takes_a_module(getattr(module, "_init_weights", None))
            ),
            None,
        )


def why_without_values(name: str, module: nn.Module) -> str:
    """Return the message about a module without an initializer."""
    label = f"'{name}' ({type(module).__name__})" if name else type(module).__name__
    return (
        f"{label} was built on the meta device, but it has no reset_parameters() method that "
        "sets its values. Add this method, build the model in __init__, or use "
        "PTDPStrategy(meta_init=False)"
    )


def _resets(chain: list[Any]) -> list[Callable[[], object]]:
    """Return the reset functions of the last module and of the modules around it.

    Modules of torch that set values of their children, such as ``nn.MultiheadAttention``, do so in
    ``_reset_parameters``.
    """
    methods = (getattr(chain[-1], key, None) for key in ("reset_parameters", "_reset_parameters"))
    outer = (getattr(module, "_reset_parameters", None) for module in reversed(chain[:-1]))
    return [reset for reset in (next(filter(callable, methods), None), *outer) if callable(reset)]


def _takes_a_module(function: object) -> bool:
    if not callable(function):
        return False
    parameters = inspect.signature(function).parameters.values()
    return (
        sum(
            p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            for p in parameters
        )
        == 1
    )


def _unset(tensor: Tensor) -> Tensor:
    """Return a real tensor full of a value that no initializer gives.

    It is float32 where ``tensor`` is in half precision, so that one seed gives the same values in
    every precision.
    """
    # Needed until torch 2.12, whose CPU generator draws the same numbers for every floating-point
    # dtype.
    dtype = torch.float32 if tensor.dtype in _HALF else tensor.dtype
    real = torch.full_like(tensor, _mark(tensor.dtype), dtype=dtype, device="cpu")
    return nn.Parameter(real, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real


def _in_dtype_of(value: Tensor | None, declared: Tensor | None) -> Tensor | None:
    """Return ``value`` rounded to a half precision, the dtype of the declared tensor."""
    if (
        value is None
        or declared is None
        or declared.dtype not in _HALF
        or value.dtype is not torch.float32
    ):
        return value
    rounded = value.detach().to(declared.dtype)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(rounded, value.requires_grad)
    return rounded


def _mark(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else (torch.iinfo(dtype).min or torch.iinfo(dtype).max)


def _check_set(module: nn.Module, name: str, others: Collection[str]) -> None:
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if key in others or tensor is None or tensor.dtype is torch.bool or tensor.numel() == 0:
            continue
        mark = _mark(tensor.dtype)
        if bool((tensor.isnan() if mark != mark else tensor == mark).any()):
            raise ValueError(
                f"'{name}.{key}' ({type(module).__name__}) was built on the meta device, but "
                "neither reset_parameters() nor the model's _init_weights(module) sets its values. "
                "Set them there, build the model in __init__, or use PTDPStrategy(meta_init=False)"
            )
