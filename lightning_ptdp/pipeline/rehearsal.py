"""Rehearsal of all pipeline stages in one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_ptdp.parameters.shadow import without_tensors
from lightning_ptdp.pipeline.call_order import examples, guesses, on_meta, trace_calls
from lightning_ptdp.pipeline.containers import layers_of
from lightning_ptdp.pipeline.crossing import Crossing, StageError
from lightning_ptdp.pipeline.stage import ModelParts, PipelineCut


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
        for name, module, args, kwargs in (
            *examples(self.model),
            *guesses(self.model, self._layers),
        ):
            copy = without_tensors(self.model).eval()
            call = partial(_call, copy.get_submodule(name), on_meta(args), on_meta(kwargs))
            with torch.device("meta"):
                failure = _run_stages(self._cut(copy), call)
            if failure is None:
                return
            prefix = f"{name}." if name else ""
            if _runs_whole(module, args, kwargs, prefix=prefix, layers=self._layers):
                raise self._refusal(*failure) from failure[1]

    def on_step(self, step: Callable[[], object]) -> ValueError | None:
        """Run ``step`` on the whole model, then as each stage. The model is cut in place.

        Returns:
            The error of a stage that fails, although the step runs on the whole model.
        """
        step()
        failure = _run_stages(self._cut(self.model), step)
        return None if failure is None else self._refusal(*failure)

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


def _run_stages(cut: PipelineCut, step: Callable[[], object]) -> tuple[int, Exception] | None:
    """Run all stages and return the failed stage and its error; None if all succeed."""
    received: Crossing | None = None
    for stage in cut.stages:
        try:
            with torch.enable_grad():
                crossing, is_last = cut.run(stage, received, step, training=True)
        except Exception as error:
            return stage, error
        if not is_last:
            received = crossing.entering()
    return None


def _runs_whole(
    module: nn.Module, args: Any, kwargs: Any, *, prefix: str, layers: Sequence[str]
) -> bool:
    """Return True if the uncut module takes this input and calls each block once."""
    calls = [prefix + call for call in trace_calls(module, *args, **kwargs) or ()]
    return all(calls.count(layer) == 1 for layer in layers)


def _call(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Call a module and drop its output, because the user's step need not return all of it."""
    module(*args, **kwargs)


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
