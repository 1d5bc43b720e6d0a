"""The shape of any model, traced from its forward, and arguments to call the model with.

The module runs on tensors without data. Its blocks run alone with their backward, once per kind
(class, parameters, sizes of the inputs). The operations before and after the blocks are the ends.
The plan defines which parameters t divides, and the trace follows the division through every
operation (``operation_recorder.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.base.nested import iterate_tensors, map_tensors
from lightning_ptdp.pipeline.containers import layers_of, multiply_adds
from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.planner.operation_recorder import Trace
from lightning_ptdp.planner.planned_parameters import (
    counted,
    divided,
    parameters_of,
    planned_modules,
    split_weights,
    tables,
)
from lightning_ptdp.planner.shapes import (
    Bytes,
    EndShape,
    LayerShape,
    ModelShape,
    Parameters,
    Product,
)
from lightning_ptdp.planner.software import Precision, Software
from lightning_ptdp.planner.traced_blocks import LayerTracer, Run, TracedLayer
from lightning_ptdp.shims.transformers import image_parts
from lightning_ptdp.tensor_parallel import ParallelPlan, Whole

_SAMPLES = 122
"""Samples of the traced batch.

A size that they divide is taken for one with values of each sample. They are twice a prime, so that
few other sizes are, and even, because models of pairs cannot run an odd number of samples.
"""


def trace_shape(
    module: nn.Module,
    plan: ParallelPlan,
    run: Run,
    *,
    precision: Precision,
    software: Software,
    on_cpu: bool,
    sequence_length: int,
) -> ModelShape:
    """Return the shape of ``module``, which stays unchanged.

    Args:
        module: The unsharded model, on the meta device or with values.
        plan: Parameters that t divides, and names of the blocks.
        run: Calls the module with a batch.
        precision: Precision of the counted bytes.
        software: Software whose reads and writes are counted.
        on_cpu: Whether the model runs on CPUs.
        sequence_length: s in tokens, for costs per token.

    Raises:
        ValueError: There are no blocks, or the forward does not run without data. The message names
            the module where it stopped.
    """
    parts = find_parts(module, plan)
    names = [layer.name for layer in layers_of(module, parts.blocks)]
    planned = planned_modules(module, plan)
    weights = split_weights(planned)
    traced = LayerTracer(
        module=module,
        names=names,
        weights=weights,
        full_sequence=[name for name, _, kind in planned if isinstance(kind, Whole)],
        samples=_SAMPLES,
        precision=precision,
        software=software,
        on_cpu=on_cpu,
    )
    traced.follow(run)
    of_layers = counted(module, names, weights, precision.weight)
    shapes = dict[object, LayerShape]()
    layers = list[LayerShape]()
    for kind, name in zip(traced.order, names, strict=True):
        parameters = of_layers[name]
        cost = multiply_adds(module.get_submodule(name)) or 1.0
        key = (kind, parameters, cost)
        if key not in shapes:
            shapes[key] = _layer(traced.layers[kind], parameters, cost)
        layers.append(shapes[key])
    first_table, head_table = tables(planned, parts)
    counted_elsewhere = {*_ids(module, names), id(first_table), id(head_table)}
    of_head = _ids(module, parts.after)
    ends = [p for p in module.parameters() if id(p) not in counted_elsewhere]
    first = _end(
        traced.input,
        parameters=parameters_of(
            (p for p in ends if id(p) not in of_head), weights, precision.weight
        ),
        table=first_table,
        cost=sum(multiply_adds(module.get_submodule(name)) for name in parts.before),
        width=precision.compute,
    )
    head = _end(
        traced.head,
        parameters=parameters_of((p for p in ends if id(p) in of_head), weights, precision.weight),
        table=head_table,
        cost=sum(multiply_adds(module.get_submodule(name)) for name in parts.after),
        width=precision.compute,
    )
    equal = [list(group) for _, group in itertools.groupby(layers, key=id)]
    return ModelShape(
        runs=tuple((len(group), group[0]) for group in equal),
        input=first,
        head=head,
        tied=head_table is not None and head_table is first_table,
        sequence_length=sequence_length,
        divided=divided(module, planned),
        splits_sequence=plan.sequence is not None and len(parts.blocks) == 1,
        uncut=plan.why_not.get("pipeline", ""),
    )


def _ids(module: nn.Module, names: Iterable[str]) -> set[int]:
    """Return the ``id`` of each parameter of the modules with these names."""
    return {id(p) for name in names for p in module.get_submodule(name).parameters()}


def with_images(shape: ModelShape, module: nn.Module) -> ModelShape:
    """Return a shape traced from texts with the products of the module's vision tower.

    The tower runs on the first stage, by assumption for one patch per token of the sequence, as in
    ``layer_ranges``.
    """
    towers = image_parts(module)
    products = [
        Product(rows=shape.sequence_length, outputs=len(matrix), inputs=matrix[0].numel())
        for name, matrix in module.named_parameters()
        if name.startswith(towers) and matrix.dim() > 1
    ]
    first = replace(shape.input, products=(*products, *shape.input.products))
    return replace(shape, input=first)


def _layer(followed: TracedLayer, parameters: Parameters, cost: float) -> LayerShape:
    trace = followed.trace
    return LayerShape(
        products=tuple(trace.products),
        attentions=tuple(trace.attentions),
        forward=_per_sample(trace.forward),
        backward=_per_sample(trace.backward),
        kept=_kept(trace.kept.values()),
        crossing=followed.crossing / _SAMPLES,
        parameters=parameters,
        cost=cost,
        gated=trace.gated,
        experts=followed.experts,
    )


def _end(
    trace: Trace, *, parameters: Parameters, table: nn.Parameter | None, cost: float, width: int
) -> EndShape:
    kept = list(trace.kept.values())
    if trace.products:
        # Tensors of the logits' size are counted with the loss (memory.py).
        last = trace.products[-1]
        size = _SAMPLES * last.rows * last.outputs * width
        kept = [(nbytes, split) for nbytes, split in kept if nbytes < size]
    forward = _per_sample(trace.forward)
    return EndShape(
        products=tuple(trace.products),
        forward=forward,
        backward=Bytes(replicated=2 * forward.replicated, split=2 * forward.split),
        kept=_kept(kept),
        parameters=parameters,
        table=(0, 0) if table is None else (table.size(0), table.numel() // table.size(0)),
        cost=cost,
    )


def _per_sample(amounts: Sequence[float]) -> Bytes:
    replicated, split = amounts
    return Bytes(replicated=replicated / _SAMPLES, split=split / _SAMPLES)


def _kept(storages: Iterable[tuple[int, bool]]) -> Bytes:
    """Return the sum of (bytes, whether t divides them), per sample and per microbatch."""
    amounts = [0.0, 0.0]
    once = 0
    for nbytes, split in storages:
        if nbytes % _SAMPLES:
            once += nbytes
        else:
            amounts[split] += nbytes
    return replace(_per_sample(amounts), once=once)


# ---- Arguments to call a model with when it runs without data ------------------------------------


Example = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""Arguments of a module's forward: one, several, or several by name.

The first dimension of each tensor is the batch.
"""

_LENGTHS = ("sequence_length", "max_position_embeddings", "n_positions")


def call_with(module: nn.Module, example: Example | None, *, sequence_length: int | None) -> Run:
    """Return a function that calls ``module`` with a batch of a given size.

    The arguments are ``example``, or the module's ``example_input_array``, at this batch size.
    Without either, a Hugging Face model inside the module is called with its own arguments. A model
    with an embedding is called with token ids.

    Args:
        module: The unsharded model.
        example: Arguments of its forward.
        sequence_length: s in tokens; None if it is unknown.

    Raises:
        ValueError: The arguments of the module, or the length of its sequences, are unknown.
    """
    inputs = _example(module, example)
    if inputs is not None:
        return lambda model, samples: _call(model, _sized(inputs, samples))
    for name, child in module.named_modules():
        if isinstance(getattr(child, "dummy_inputs", None), Mapping):
            input_key = getattr(child, "main_input_name", "input_ids")
            if input_key not in ("input_ids", "pixel_values"):
                raise ValueError(
                    f"{type(child).__name__} takes {input_key}. Pass example=, an example input of "
                    "its forward, to plan"
                )
            tokens = 1 if input_key == "pixel_values" else _known(sequence_length, module)
            return lambda model, samples: model.get_submodule(name)(
                **_inputs(child, samples, tokens)
            )
    if any(isinstance(child, nn.Embedding) for child in module.modules()):
        tokens = _known(sequence_length, module)
        return lambda model, samples: model(torch.zeros(samples, tokens, dtype=torch.long))
    raise ValueError(
        f"the inputs of {type(module).__name__} are unknown. Pass example=, an example input "
        "of its forward, to plan, or set the module's example_input_array"
    )


def longest_sample(module: nn.Module, example: Example | None = None) -> int | None:
    """Return the tokens of the longest sample by the module's configuration, or None.

    The length of the ids in the example takes precedence.
    """
    tensors = iterate_tensors(_example(module, example))
    ids = next((tensor for tensor in tensors if not tensor.is_floating_point()), None)
    if ids is not None and ids.dim() > 1:
        return ids.size(1)
    for child in module.modules():
        config = getattr(child, "config", None)
        if config is not None:
            sizes = config.get_text_config() if hasattr(config, "get_text_config") else config
            for name in _LENGTHS:
                if isinstance(length := getattr(sizes, name, None), int) and length > 0:
                    return length
    return None


def _example(module: nn.Module, example: Example | None) -> Any:
    return getattr(module, "example_input_array", None) if example is None else example


def _known(sequence_length: int | None, module: nn.Module) -> int:
    if sequence_length is None:
        raise ValueError(
            f"the sequence length of {type(module).__name__} is unknown. Pass sequence_length= "
            "(--sequence of ptdp plan) or example=, an example input of its forward, or set "
            "the module's example_input_array"
        )
    return sequence_length


def _call(model: nn.Module, example: Example) -> object:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def _sized(example: Any, samples: int) -> Any:
    def sized(tensor: Tensor) -> Tensor:
        return torch.zeros((samples, *tensor.shape[1:]), dtype=tensor.dtype)

    return map_tensors(example, sized)


def _inputs(model: nn.Module, samples: int, length: int) -> dict[str, Any]:
    """Return the inputs of a Hugging Face model."""
    config: Any = model.config
    inputs: dict[str, Any] = {"use_cache": False} if hasattr(config, "use_cache") else {}
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return {
            "pixel_values": torch.zeros(samples, getattr(config, "num_channels", 3), height, width)
        }
    inputs["input_ids"] = torch.zeros(samples, length, dtype=torch.long)
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return inputs
