"""Rehearsal of all pipeline stages in one process, without data.

The stages run on the example of the model's input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_ptdp.parameters.shadow import without_tensors
from lightning_ptdp.pipeline.call_order import examples, guesses, on_meta, trace_calls
from lightning_ptdp.pipeline.containers import layers_of
from lightning_ptdp.pipeline.crossing import Crossing, StageError
from lightning_ptdp.pipeline.stage import ModelParts, PipelineCut

__all__ = ["rehearse"]


def rehearse(
    model: nn.Module,
    *,
    parts: ModelParts,
    ranges: Sequence[tuple[int, int]],
    collects: bool,
    pipeline_parallel_size: int,
) -> None:
    """Run all stages, one after the other, on an example input without data.

    The stages run only if the example shows a forward that calls each block once. The model is not
    changed. If the model has no example, one tensor of the size that its first layer takes is
    tried.

    Args:
        model: The whole, uncut module.
        parts: Positions of its modules relative to the containers.
        ranges: Half-open layer ranges, one per stage.
        collects: Whether everything that blocks return crosses to all later stages.
        pipeline_parallel_size: Number of pipeline ranks, for messages.

    Raises:
        ValueError: A stage fails, although the whole model runs.
    """
    layers = [layer.name for layer in layers_of(model, parts.blocks)]
    for name, module, args, kwargs in (*examples(model), *guesses(model, layers)):
        copy = without_tensors(model).eval()
        cut = PipelineCut(
            copy, parts=parts, ranges=ranges, stages=range(len(ranges)), collects=collects
        )
        failure = _run_stages(
            cut, partial(_call, copy.get_submodule(name), on_meta(args), on_meta(kwargs))
        )
        if failure is None:
            return
        if _runs_whole(module, args, kwargs, prefix=f"{name}." if name else "", layers=layers):
            stage, error = failure
            why = _why(error, parts, layers[ranges[stage][0]])
            raise ValueError(
                f"pipeline_parallel_size={pipeline_parallel_size} cannot cut "
                f"{type(model).__name__}: {why}"
            ) from error


def _run_stages(cut: PipelineCut, step: Callable[[], None]) -> tuple[int, Exception] | None:
    """Run all stages and return the failed stage and its error; None if all succeed."""
    received: Crossing | None = None
    for stage in cut.stages:
        try:
            with torch.enable_grad(), torch.device("meta"):
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
