"""Rehearsal of the pipeline's stages in one process, on the example of a model's input without data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_ptdp.initial_values.shadow import without_tensors
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
    """Run all stages, one after the other, if an example of the input shows a forward that calls each block once. The model is not
    changed. Where it brings no example, one tensor of the size that its first layer takes is tried.

    Args:
        model: The whole, uncut module.
        parts: Where its modules stand.
        ranges: Half-open layer ranges, one a stage.
        collects: Whether all that blocks return crosses to all later stages.
        pipeline_parallel_size: Number of pipeline ranks, for messages.

    Raises:
        ValueError: A stage fails, though the whole model runs.
    """
    layers = [layer.name for layer in layers_of(model, parts.blocks)]
    for name, module, args, kwargs in (*examples(model), *guesses(model, layers)):
        prefix = f"{name}." if name else ""
        calls = [prefix + call for call in trace_calls(module, *args, **kwargs) or ()]
        if [calls.count(layer) for layer in layers] != [1] * len(layers):
            continue
        copy = without_tensors(model).eval()
        stages = range(len(ranges))
        cut = PipelineCut(copy, parts=parts, ranges=ranges, stages=stages, collects=collects)
        step = partial(_call, copy.get_submodule(name), on_meta(args), on_meta(kwargs))
        received: Crossing | None = None
        for stage in stages:
            try:
                with torch.enable_grad(), torch.device("meta"):
                    crossing, is_last = cut.run(stage, received, step, training=True)
            except Exception as error:
                why = _why(error, parts, layers[ranges[stage][0]])
                raise ValueError(
                    f"pipeline_parallel_size={pipeline_parallel_size} cannot cut {type(model).__name__}: {why}"
                ) from error
            if not is_last:
                received = crossing.entering()
        return


def _call(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Call a module. Its output is dropped, because the user's step need not return all of it."""
    module(*args, **kwargs)


def _why(error: Exception, parts: ModelParts, first: str) -> str:
    if isinstance(error, StageError) or "pipeline stage" in str(error):  # a stand-in was asked for an attribute
        return str(error)
    reason = re.split(r"\n|\. ", str(error))[0]
    return (
        f"the stage that begins with block '{first}' fails ({type(error).__name__}: {reason}). Of the blocks of {parts.shown} a stage is "
        "given only what the last one before it returned, so that skip connections are lost. Use pipeline_parallel_size=1"
    )
