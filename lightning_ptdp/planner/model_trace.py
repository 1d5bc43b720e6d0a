"""The shape of any model, traced from its forward.

The module runs on tensors without data. Its blocks run alone with their backward, once per kind
(class, parameters, sizes of the inputs). The operations before and after the blocks are the ends.
The plan defines which parameters t divides, and the trace follows the division through every
operation (``operation_recorder.py``). Two batches of different size separate the bytes kept per
sample from the bytes kept once.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from torch import nn

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
from lightning_ptdp.planner.traced_blocks import Followed, Following, Run
from lightning_ptdp.shims.transformers import image_parts
from lightning_ptdp.tensor_parallel import ParallelPlan, Whole

_FEW = 2
_MANY = 4


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
        module: The whole model, on the meta device or with values.
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
    small, large = (
        Following(
            module=module,
            names=names,
            weights=weights,
            whole=[name for name, _, kind in planned if isinstance(kind, Whole)],
            samples=samples,
            precision=precision,
            software=software,
            on_cpu=on_cpu,
        )
        for samples in (_FEW, _MANY)
    )
    for tracing in (small, large):
        tracing.follow(run)
    of_layers = counted(module, names, weights, precision.weight)
    shapes = dict[object, LayerShape]()
    layers = list[LayerShape]()
    for kind, name in zip(small.order, names, strict=True):
        parameters = of_layers[name]
        cost = multiply_adds(module.get_submodule(name)) or 1.0
        key = (kind, parameters, cost)
        if key not in shapes:
            shapes[key] = _layer(small.layers[kind], large.layers[kind], parameters, cost)
        layers.append(shapes[key])
    first, head = tables(planned, parts)
    elsewhere = {id(p) for name in names for p in module.get_submodule(name).parameters()}
    elsewhere |= {id(first), id(head)}
    of_head = {id(p) for name in parts.after for p in module.get_submodule(name).parameters()}
    in_ends: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for p in module.parameters():
        if id(p) not in elsewhere:
            in_ends[id(p) in of_head].append(p)
    ends = [
        _end(
            *traces,
            parameters=parameters_of(own, weights, precision.weight),
            table=table,
            cost=sum(multiply_adds(module.get_submodule(name)) for name in tops),
            width=precision.compute,
        )
        for traces, own, table, tops in (
            ((small.input, large.input), in_ends[0], first, parts.before),
            ((small.head, large.head), in_ends[1], head, parts.after),
        )
    ]
    equal = [list(group) for _, group in itertools.groupby(layers, key=id)]
    return ModelShape(
        runs=tuple((len(group), group[0]) for group in equal),
        input=ends[0],
        head=ends[1],
        tied=head is not None and head is first,
        sequence_length=sequence_length,
        divided=divided(module, planned),
        splits_sequence=plan.sequence is not None and len(parts.blocks) == 1,
        uncut=plan.why_not.get("pipeline", ""),
    )


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


def _layer(small: Followed, large: Followed, parameters: Parameters, cost: float) -> LayerShape:
    trace = small.trace
    forward, backward = (
        Bytes(alike=alike / _FEW, split=split / _FEW)
        for alike, split in (trace.forward, trace.backward)
    )
    return LayerShape(
        products=tuple(trace.products),
        attentions=tuple(trace.attentions),
        forward=forward,
        backward=backward,
        kept=_kept(trace, large.trace),
        crossing=small.crossing / _FEW,
        parameters=parameters,
        cost=cost,
        gated=trace.gated,
        experts=small.experts,
    )


def _kept(small: Trace, large: Trace) -> Bytes:
    """Return the kept bytes per sample and once, by a straight line through two batch sizes."""

    def total(trace: Trace, divided: bool) -> int:
        return sum(nbytes for nbytes, split in trace.kept.values() if split is divided)

    slopes = [
        (total(large, divided) - total(small, divided)) / (_MANY - _FEW)
        for divided in (False, True)
    ]
    once = sum(
        total(small, divided) - _FEW * slope
        for divided, slope in zip((False, True), slopes, strict=True)
    )
    return Bytes(alike=slopes[0], split=slopes[1], once=max(0.0, once))


def _end(
    small: Trace,
    large: Trace,
    *,
    parameters: Parameters,
    table: nn.Parameter | None,
    cost: float,
    width: int,
) -> EndShape:
    if small.products:
        # Tensors of the logits' size are counted with the loss (memory.py).
        size = small.products[-1].rows * small.products[-1].outputs * width
        small, large = (
            replace(trace, kept={k: v for k, v in trace.kept.items() if v[0] < size * n})
            for trace, n in ((small, _FEW), (large, _MANY))
        )
    alike, split = small.forward
    return EndShape(
        products=tuple(small.products),
        forward=Bytes(alike=alike / _FEW, split=split / _FEW),
        backward=Bytes(alike=2 * alike / _FEW, split=2 * split / _FEW),
        kept=_kept(small, large),
        parameters=parameters,
        table=(0, 0) if table is None else (table.size(0), table.numel() // table.size(0)),
        cost=cost,
    )
