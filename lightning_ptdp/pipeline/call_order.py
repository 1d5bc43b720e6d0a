"""Module calls of a model, traced by running its forward without data on the meta device.

The trace gives the order of the calls, and the modules whose parameters are used without a call of
the module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_ptdp.base.nested import map_tensors
from lightning_ptdp.parameters.shadow import without_tensors


def call_order(model: nn.Module) -> list[str] | None:
    """Return the names of the modules that the model's forward calls, in call order.

    The input comes from the LightningModule's ``example_input_array``. Otherwise it comes from the
    ``dummy_inputs`` of the first Hugging Face model inside, and only that model is called.

    Returns:
        The names, or None if there is no such example or if the forward cannot run without data
        (because its behaviour depends on values).
    """
    for name, module, args, kwargs in examples(model):
        calls = trace_calls(module, *args, **kwargs)
        if calls is not None:
            return [_within(name, call) for call in calls]
    return None


def trace_calls(model: nn.Module, *args: Any, **kwargs: Any) -> list[str] | None:
    """Return the names of the modules that ``model(*args, **kwargs)`` calls, in call order.

    The result is None if the model cannot run without data.
    """
    uses = _Uses(model)
    return uses.calls if uses.run(args, kwargs) else None


def used_uncalled(model: nn.Module) -> frozenset[str]:
    """Return the names of the modules whose parameters the forward uses without a call.

    ``F.linear(x, self.embedding.weight)`` is such a use. Only uses that the example shows are
    found. Decisions that depend on values are made as if the values were zero.
    """
    names: set[str] = set()
    for name, module, args, kwargs in examples(model):
        uses = _Uses(module, guesses=True)
        uses.run(args, kwargs)
        names.update(_within(name, inner) for inner in uses.uncalled)
    return frozenset(names)


def _within(name: str, inner: str) -> str:
    return f"{name}.{inner}" if name and inner else name or inner


_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
_READS = {
    "item": 0,
    "__bool__": False,
    "__contains__": False,
    "__int__": 0,
    "__float__": 0.0,
    "__index__": 0,
}


class _Uses(TorchFunctionMode):
    """Trace of one run of ``model`` without data.

    Attributes:
        calls: Names of the called modules, in call order.
        uncalled: Names of the modules with a parameter that was used while none of its owners was
            being called.
    """

    def __init__(self, model: nn.Module, *, guesses: bool = False) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.uncalled: set[str] = set()
        self._model = model = without_tensors(model).eval()
        self._guesses = guesses
        self._running: Counter[str] = Counter()
        self._owners: dict[int, list[str]] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enters, name))
            module.register_forward_hook(partial(self._leaves, name), always_call=True)
            for parameter in module._parameters.values():
                self._owners.setdefault(id(parameter), []).append(name)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Call the model and return True if the call completed."""
        try:
            with torch.no_grad(), torch.device("meta"), self:
                self._model(*on_meta(args), **on_meta(kwargs))
        except Exception:
            return False
        return True

    def _enters(self, name: str, module: nn.Module, args: Any) -> None:
        self.calls.append(name)
        if isinstance(module, nn.Embedding) and args and not isinstance(args[0], Tensor):
            # The module takes positions as numbers: a stub cannot know what it returns.
            self.uncalled.add(name)
        self._running[name] += 1

    def _leaves(self, name: str, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._running[name] -= 1

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if self._guesses and name in _READS:
            return _READS[name]
        # Models read dtype or device from the first parameter that they find, but read the shape of
        # a specific parameter. Of these reads, only that of the shape counts as a use.
        if name != "__get__" or function == _SHAPE:
            for value in (*args, *(kwargs or {}).values()):
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    owners = (
                        self._owners.get(id(tensor), ()) if isinstance(tensor, nn.Parameter) else ()
                    )
                    if owners and not any(self._running[owner] for owner in owners):
                        self.uncalled.update(owners)
        return function(*args, **(kwargs or {}))


def on_meta(arguments: Any) -> Any:
    """Return nested arguments with their tensors on the meta device."""
    return map_tensors(arguments, lambda tensor: tensor.to("meta"))


def examples(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module, tuple[Any, ...], Mapping[str, Any]]]:
    """Yield example calls: module name, module, positional and keyword arguments."""
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
            # The forward may read the values of masks. The same modules are called without masks.
            unmasked = {key: value for key, value in inputs.items() if "mask" not in key}
            pixels = _pixels(module)
            if len(unmasked) < len(inputs):
                yield name, module, (), unmasked
            if pixels:
                yield name, module, (), {**unmasked, **pixels}
            return


def guesses(
    model: nn.Module, inside: Collection[str]
) -> Iterator[tuple[str, nn.Module, tuple[Any, ...], Mapping[str, Any]]]:
    """Yield modules around all of ``inside`` with one tensor sized for their first layer."""
    for name, module in model.named_modules():
        if all(name == "" or inner.startswith(f"{name}.") for inner in inside):
            first = next((child for child in module.modules() if isinstance(child, _FIRST)), None)
            for example in () if first is None else _inputs(first):
                yield name, module, (example,), {}


_FIRST = (nn.Embedding, nn.Linear, nn.Conv1d, nn.Conv2d)


def _inputs(layer: Any) -> Iterator[Tensor]:
    if isinstance(layer, nn.Embedding):
        yield torch.zeros(1, 8, dtype=torch.long)
    elif isinstance(layer, nn.Linear):
        yield torch.zeros(1, 8, layer.in_features)
        yield torch.zeros(1, layer.in_features)
    else:
        yield torch.zeros(1, layer.in_channels, *[64] * (layer.weight.dim() - 2))


def _pixels(model: Any) -> dict[str, Tensor]:
    """Return an image input for a Hugging Face model with a vision tower, else an empty dict."""
    config = getattr(getattr(model, "config", None), "vision_config", None)
    size = getattr(config, "image_size", None)
    if not isinstance(size, int):
        return {}
    return {"pixel_values": torch.zeros(1, getattr(config, "num_channels", 3), size, size)}
