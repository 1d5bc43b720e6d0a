"""The shape of any model, traced from its forward.

The module runs on tensors without data. Its blocks run alone with their backward, once per kind
(class, parameters, sizes of the inputs). The operations before and after the blocks are the ends.
The plan defines which parameters t divides, and the trace follows the division through every
operation (``operation_recorder.py``). Two batches of different size separate the bytes kept per
sample from the bytes kept once.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lightning_ptdp.pipeline.containers import multiply_adds
from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.planner.operation_recorder import Trace
from lightning_ptdp.planner.planned_parameters import (
    counted,
    divided,
    parameters_of,
    split_weights,
    tables,
)
from lightning_ptdp.planner.precision_bytes import Precision
from lightning_ptdp.planner.shapes import (
    Bytes,
    EndShape,
    LayerShape,
    ModelShape,
    Parameters,
    Product,
)
from lightning_ptdp.planner.software import Software
from lightning_ptdp.planner.traced_blocks import Followed, Following, Run
from lightning_ptdp.shims.transformers import image_parts
from lightning_ptdp.tensor_parallel import ParallelPlan

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
    small, large = (
        Following(
            module,
            plan,
            parts,
            samples=samples,
            precision=precision,
            software=software,
            on_cpu=on_cpu,
        )
        for samples in (_FEW, _MANY)
    )
    for tracing in (small, large):
        tracing.follow(run)
    layers = [_layer(a, b) for a, b in zip(small.layers, large.layers, strict=True)]
    of_layers = counted(module, plan, parts, precision.weight)
    runs = list[tuple[int, LayerShape]]()
    shapes = dict[object, LayerShape]()
    for index, (kind, name) in enumerate(zip(small.order, small.names, strict=True)):
        parameters = of_layers[name]
        cost = multiply_adds(module.get_submodule(name)) or 1.0
        key = (kind, parameters, cost)
        layer = shapes.setdefault(key, replace(layers[kind], parameters=parameters, cost=cost))
        if index and runs[-1][1] is layer:
            runs[-1] = (runs[-1][0] + 1, layer)
        else:
            runs.append((1, layer))
    first, head, tied = tables(module, plan, parts)
    after = {
        name
        for top in parts.after
        for name, _ in module.get_submodule(top).named_parameters(prefix=top)
    }
    head_ids = {id(module.get_parameter(name)) for name in after}
    in_layers = {id(p) for name in small.names for p in module.get_submodule(name).parameters()}
    end_parameters = [
        p
        for p in module.parameters()
        if id(p) not in in_layers and p is not first and p is not head
    ]
    weights = split_weights(module, plan)
    ends = [
        parameters_of(
            [p for p in end_parameters if (id(p) in head_ids) is in_head], weights, precision.weight
        )
        for in_head in (False, True)
    ]
    costs = [
        sum(multiply_adds(module.get_submodule(name)) for name in names)
        for names in (parts.before, parts.after)
    ]
    return ModelShape(
        runs=tuple(runs),
        input=_end(small.input, large.input, ends[0], first, costs[0], precision.compute),
        head=_end(small.head, large.head, ends[1], head, costs[1], precision.compute),
        tied=tied,
        sequence_length=sequence_length,
        divided=tuple(divided(module, plan)),
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


def _layer(small: Followed, large: Followed) -> LayerShape:
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
        parameters=Parameters(),
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
    parameters: Parameters,
    table: nn.Parameter | None,
    cost: float,
    width: int,
) -> EndShape:
    forward = small.forward
    logits = small.products[-1] if small.products else None
    kept = _kept(small, large)
    if logits is not None:
        # Tensors of the logits' size are counted with the loss (activations.py).
        size = logits.rows * logits.outputs * width
        small, large = (
            replace(trace, kept={k: v for k, v in trace.kept.items() if v[0] < size * n})
            for trace, n in ((small, _FEW), (large, _MANY))
        )
        kept = _kept(small, large)
    return EndShape(
        products=tuple(small.products),
        forward=Bytes(alike=forward[0] / _FEW, split=forward[1] / _FEW),
        backward=Bytes(alike=2 * forward[0] / _FEW, split=2 * forward[1] / _FEW),
        kept=kept,
        parameters=parameters,
        table=(0, 0) if table is None else (table.size(0), table.numel() // table.size(0)),
        cost=cost,
    )
