"""The order in which a model calls its modules, seen by running its forward without data on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_ptdp.shadow import without_tensors

__all__ = ["call_order", "trace_calls"]


def call_order(model: nn.Module) -> list[str] | None:
    """Names of the modules that the model's forward calls, in the order of the calls.

    What the forward is given comes from the LightningModule's ``example_input_array``, or from the ``dummy_inputs`` of the first
    Hugging Face model inside, which is then called alone.

    Returns:
        None if there is no such example, or if the forward cannot run without data (because what it does depends on values).
    """
    for name, module, args, kwargs in _examples(model):
        calls = trace_calls(module, *args, **kwargs)
        if calls is not None:
            return [f"{name}.{call}" if name and call else name or call for call in calls]
    return None


def trace_calls(model: nn.Module, *args: Any, **kwargs: Any) -> list[str] | None:
    """Names of the modules that ``model(*args, **kwargs)`` calls, in the order of the calls; None if it cannot run without data."""
    shadow = without_tensors(model).eval()
    calls: list[str] = []
    for name, module in shadow.named_modules():
        module.register_forward_pre_hook(partial(_note, calls, name))
    on_meta = partial(apply_to_collection, dtype=Tensor, function=_to_meta)
    try:
        with torch.no_grad(), torch.device("meta"):
            shadow(*on_meta(args), **on_meta(kwargs))
    except Exception:
        return None
    return calls


def _note(calls: list[str], name: str, _module: nn.Module, _args: Any) -> None:
    calls.append(name)


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def _examples(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[Any, ...], Mapping[str, Any]]]:
    """(name, module, arguments) of what can be called."""
    for name, module in model.named_modules():
        example = getattr(module, "example_input_array", None)
        if isinstance(example, Mapping):
            yield name, module, (), example
        elif example is not None:
            yield name, module, example if isinstance(example, tuple) else (example,), {}
    for name, module in model.named_modules():
        inputs = getattr(module, "dummy_inputs", None)
        if isinstance(inputs, Mapping):
            yield name, module, (), inputs
            # Masks are looked at; without them the same modules are called.
            yield name, module, (), {key: value for key, value in inputs.items() if "mask" not in key}
            return
