"""Runs of a model without data: the order of its calls, and a rehearsal of its stages.

A forward on the meta device shows the order in which modules are called, and the modules whose
parameters are used without a call of the module. A rehearsal runs all stages of a pipeline in one
process.
"""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ptdp.base.nested import map_tensors
from lightning_ptdp.base.torch_calls import CallMode, TorchCall
from lightning_ptdp.parameters.structure_copies import without_tensors
from lightning_ptdp.pipeline.containers import ModelParts, layers_of
from lightning_ptdp.pipeline.crossing import Crossing, StageError
from lightning_ptdp.pipeline.remote_modules import SUMMED
from lightning_ptdp.pipeline.stage import PipelineCut


def call_order(model: nn.Module) -> list[str] | None:
    """Return the names of the modules that the model's forward calls, in call order.

    The input comes from the LightningModule's ``example_input_array``. Otherwise it comes from the
    ``dummy_inputs`` of the first Hugging Face model inside, and only that model is called.

    Returns:
        The names, or None if there is no such example or if the forward cannot run without data.
    """
    all_calls = (example.calls() for example in examples(model))
    return next((calls for calls in all_calls if calls is not None), None)


def trace_calls(model: nn.Module, *args: Any, **kwargs: Any) -> list[str] | None:
    """Return the names of the modules that ``model(*args, **kwargs)`` calls, in call order.

    The result is None if the model cannot run without data.
    """
    uses = _Uses(model)
    return uses.calls if uses.run(args, kwargs) else None


def trace_uses(model: nn.Module) -> tuple[list[str] | None, frozenset[str]]:
    """Return ``call_order`` and the names of the modules whose parameters are used without a call.

    ``F.linear(x, self.embedding.weight)`` is such a use. Only uses that the example shows are
    found. Each example runs once, because a run of a large model takes seconds.
    """
    order: list[str] | None = None
    names: set[str] = set()
    for name, module, args, kwargs in examples(model):
        uses = _Uses(module)
        if uses.run(args, kwargs) and order is None:
            order = [_within(name, call) for call in uses.calls]
        names.update(_within(name, inner) for inner in uses.uncalled)
    return order, frozenset(names)


def _within(name: str, inner: str) -> str:
    return f"{name}.{inner}" if name and inner else name or inner


class _Guesses(CallMode):
    """Makes decisions that depend on values as if the values were zero."""

    def observe_call(self, call: TorchCall) -> Any:
        """Run a call, or return the value that it would read."""
        guesses = call.name in _READS and call.args[0].is_meta
        return _READS[call.name] if guesses else call.run()


_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
_READS = {
    "item": 0,
    "__bool__": False,
    "__contains__": False,
    "__int__": 0,
    "__float__": 0.0,
    "__index__": 0,
}


class _Uses(_Guesses):
    """Trace of one run of ``model`` without data.

    Attributes:
        calls: Names of the called modules, in call order.
        uncalled: Names of the modules with a parameter that was used while none of its owners was
            being called.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.uncalled: set[str] = set()
        self._model = model = without_tensors(model).eval()
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
                self._model(*_on_meta(args), **_on_meta(kwargs))
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

    def observe_call(self, call: TorchCall) -> Any:
        """Run a call, and note the parameters that it uses."""
        # Models read dtype or device from the first parameter that they find, but read the shape of
        # a specific parameter. Of these reads, only that of the shape counts as a use.
        if call.name != "__get__" or call.function == _SHAPE:
            for tensor in call.tensors():
                owners = self._owners.get(id(tensor), [])
                if not any(self._running[owner] for owner in owners):
                    self.uncalled.update(owners)
        return super().observe_call(call)


def _on_meta(arguments: Any) -> Any:
    """Return nested arguments with their tensors on the meta device."""
    return map_tensors(arguments, lambda tensor: tensor.to("meta"))


class Example(NamedTuple):
    """A call of ``module``, which has this name in the model."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def calls(self) -> list[str] | None:
        """Return the names in the model of the modules that it calls, like ``trace_calls``."""
        calls = trace_calls(self.module, *self.args, **self.kwargs)
        return None if calls is None else [_within(self.name, call) for call in calls]


def examples(model: nn.Module) -> Iterator[Example]:
    """Yield example calls of the model or of a module in it."""
    for name, module in model.named_modules():
        example = getattr(module, "example_input_array", None)
        if isinstance(example, Mapping):
            yield Example(name, module, (), example)
        elif example is not None:
            args = example if isinstance(example, tuple) else (example,)
            yield Example(name, module, args, {})
    for name, module in model.named_modules():
        inputs = getattr(module, "dummy_inputs", None)
        if isinstance(inputs, Mapping):
            yield Example(name, module, (), inputs)
            # The forward may read the values of masks. The same modules are called without masks.
            unmasked = {key: value for key, value in inputs.items() if "mask" not in key}
            pixels = _pixels(module)
            if len(unmasked) < len(inputs):
                yield Example(name, module, (), unmasked)
            if pixels:
                yield Example(name, module, (), {**unmasked, **pixels})
            return


def guesses(model: nn.Module, inside: Collection[str]) -> Iterator[Example]:
    """Yield calls of modules around all of ``inside`` with one tensor sized for their first layer."""
    for name, module in model.named_modules():
        if all(name == "" or inner.startswith(f"{name}.") for inner in inside):
            first = next((child for child in module.modules() if isinstance(child, _FIRST)), None)
            for example in () if first is None else _inputs(first):
                yield Example(name, module, (example,), {})


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


# ---- Rehearsal -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """All stages of a pipeline, run one after the other.

    Attributes:
        model: The whole, uncut module.
        parts: Positions of its modules relative to the containers.
        ranges: Half-open layer ranges, one per stage.
        collects: Whether everything that blocks return crosses to all later stages.
        pipeline_parallel_size: Number of pipeline ranks, for messages.
    """

    model: nn.Module
    parts: ModelParts
    ranges: Sequence[tuple[int, int]]
    collects: bool
    pipeline_parallel_size: int

    def on_examples(self) -> None:
        """Run the stages on an example input without data.

        They run only if the example shows a forward that calls each block once. The model is not
        changed. If the model has no example, one tensor of the size that its first layer takes is
        tried.

        Raises:
            ValueError: A stage fails, although the whole model runs.
        """
        for example in (*examples(self.model), *guesses(self.model, self._layers)):
            copy = without_tensors(self.model).eval()
            call = partial(_call, copy.get_submodule(example.name), example)
            with torch.device("meta"):
                failure = _run_stages(self._cut(copy), call, watches=True)
            if failure is None:
                return
            if self._runs_uncut(example):
                raise self._refusal(*failure) from failure[1]

    def on_step(self, step: Callable[[], object]) -> ValueError | None:
        """Run ``step`` on the whole model, then as each stage. The model is cut in place.

        Returns:
            The error of a stage that fails, although the step runs on the whole model.
        """
        step()
        failure = _run_stages(self._cut(self.model), step)
        return None if failure is None else self._refusal(*failure)

    def _runs_uncut(self, example: Example) -> bool:
        """Return True if the uncut module takes this input and calls each block once."""
        calls = example.calls() or []
        return all(calls.count(layer) == 1 for layer in self._layers)

    @property
    def _layers(self) -> list[str]:
        return [layer.name for layer in layers_of(self.model, self.parts.blocks)]

    def _cut(self, model: nn.Module) -> PipelineCut:
        return PipelineCut(
            model,
            parts=self.parts,
            ranges=self.ranges,
            stages=range(len(self.ranges)),
            collects=self.collects,
        )

    def _refusal(self, stage: int, error: Exception) -> ValueError:
        reason = _why(error, self.parts, self._layers[self.ranges[stage][0]])
        return ValueError(
            f"pipeline_parallel_size={self.pipeline_parallel_size} cannot cut "
            f"{type(self.model).__name__}: {reason}"
        )


def _run_stages(
    cut: PipelineCut, step: Callable[[], object], *, watches: bool = False
) -> tuple[int, Exception] | None:
    """Run all stages and return the failed stage and its error; None if all succeed.

    With ``watches``, a stage fails if its forward stores a number with a gradient anywhere.
    """
    received: Crossing | None = None
    for stage in cut.stages:
        numbers = _Numbers()
        try:
            with torch.enable_grad(), numbers if watches else contextlib.nullcontext():
                result = cut.run(stage, received, step, training=True)
        except Exception as error:
            return stage, error
        if stage != cut.num_stages - 1:
            if numbers.are_stored(except_in=result):
                message = f"a block stores a number with a gradient outside of itself, {SUMMED}"
                return stage, StageError(message)
            received = result.entering()
    return None


class _Numbers(_Guesses):
    """Notes the numbers with a gradient that functions return, without keeping them."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[weakref.ref[Tensor]] = []

    def observe_call(self, call: TorchCall) -> Any:
        """Run a call, and note its result."""
        result = super().observe_call(call)
        if isinstance(result, Tensor) and result.requires_grad and result.numel() == 1:
            self._seen.append(weakref.ref(result))
        return result

    def are_stored(self, *, except_in: Crossing) -> bool:
        """Return True if a Python object other than the graph refers to one of them."""
        crossing = {id(tensor) for tensor in except_in.tensors}
        # Names bound here must not refer to a tensor by a cell, as those of a comprehension do.
        alive = (one() for one in self._seen)
        left = [one for one in alive if one is not None and id(one) not in crossing]
        referrers = [gc.get_referrers(tensor) for tensor in left]
        return any(
            not isinstance(one, FrameType) and one is not left
            for found in referrers
            for one in found
        )


def _call(module: nn.Module, example: Example) -> None:
    """Call a module and drop its output, because the user's step need not return all of it."""
    module(*_on_meta(example.args), **_on_meta(example.kwargs))


def _why(error: Exception, parts: ModelParts, first: str) -> str:
    # A placeholder's missing attribute raises an AttributeError that names the pipeline stage.
    if isinstance(error, StageError) or "pipeline stage" in str(error):
        return str(error)
    reason = re.split(r"\n|\. ", str(error))[0]
    return (
        f"the stage that begins with block '{first}' fails ({type(error).__name__}: {reason}). "
        f"A stage receives only the output of the last block of {parts.shown} before it, so "
        "skip connections are lost. Use pipeline_parallel_size=1"
    )
