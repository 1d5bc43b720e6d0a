"""The shape of any model, read off its forward.

The module is run on tensors without data. Its blocks run alone, once for each kind (class, parameters, sizes of what they are given), with
their backward; what runs before and behind them are the ends. The plan says which parameters t divides, and from there it is followed
through every operation (``recorder.py``). Two batches of different size tell what is kept of a sample from what is kept once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_ptdp._torch import storage_key, without_data
from lightning_ptdp.initial_values.shadow import without_tensors
from lightning_ptdp.pipeline.balance import multiply_adds
from lightning_ptdp.pipeline.containers import layers_of
from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.pipeline.stage import ModelParts
from lightning_ptdp.planner.expert_shape import ExpertShape
from lightning_ptdp.planner.precision import Precision
from lightning_ptdp.planner.recorder import Recorder, Trace, Weight, as_on_accelerators
from lightning_ptdp.planner.shapes import Bytes, Divided, EndShape, LayerShape, ModelShape, Parameters
from lightning_ptdp.planner.software import Software
from lightning_ptdp.tensor_parallel import Experts, Kind, ParallelPlan, Region, Vocabulary
from lightning_ptdp.tensor_parallel.kinds import Attention as AttentionKind
from lightning_ptdp.tensor_parallel.kinds import Column, Row
from lightning_ptdp.tensor_parallel.linear_like import output_input_sizes

__all__ = ["Run", "trace_shape"]

Run = Callable[[nn.Module, int], object]
"""Calls a module with a batch of so many samples."""

_FEW, _MANY = 2, 4


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
    """The shape of ``module``, which stays as it is.

    Args:
        module: The whole model; on the meta device, or with values.
        plan: What t divides, and where the blocks are.
        run: Calls it.
        precision: What its bytes are in.
        software: What its bytes are of.
        on_cpu: Whether it runs on CPUs.
        sequence_length: s in tokens, for what counts them.

    Raises:
        ValueError: There are no blocks, or the forward does not run without data; says where it stopped.
    """
    parts = find_parts(
        module, blocks=plan.blocks, before=plan.before, between=plan.between, after=plan.after, everywhere=plan.everywhere
    )
    few, many = (
        _Tracing(module, plan, parts, samples=samples, precision=precision, software=software, on_cpu=on_cpu)
        for samples in (_FEW, _MANY)
    )
    for tracing in (few, many):
        tracing.follow(run)
    layers = [_layer(one, other, software) for one, other in zip(few.layers, many.layers, strict=True)]
    counted = _counted(module, plan, parts)
    runs = list[tuple[int, LayerShape]]()
    shapes = dict[object, LayerShape]()
    for place, (kind, name) in enumerate(zip(few.order, few.names, strict=True)):
        parameters, cost = counted[name], multiply_adds(module.get_submodule(name)) or 1.0
        key = (kind, parameters, cost)
        layer = shapes.setdefault(key, replace(layers[kind], parameters=parameters, cost=cost))
        if place and runs[-1][1] is layer:
            runs[-1] = (runs[-1][0] + 1, layer)
        else:
            runs.append((1, layer))
    first, head, tied = _tables(module, plan, parts)
    after = {name for top in parts.after for name, _ in module.get_submodule(top).named_parameters(prefix=top)}
    at_head = {id(module.get_parameter(name)) for name in after}
    in_layers = {id(p) for name in few.names for p in module.get_submodule(name).parameters()}
    rest = [p for p in module.parameters() if id(p) not in in_layers and p is not first and p is not head]
    weights = _weights(module, plan)
    ends = [_parameters([p for p in rest if (id(p) in at_head) is behind], weights, module) for behind in (False, True)]
    costs = [sum(multiply_adds(module.get_submodule(name)) for name in names) for names in (parts.before, parts.after)]
    return ModelShape(
        runs=tuple(runs),
        input=_end(few.input, many.input, ends[0], first, costs[0], software),
        head=_end(few.head, many.head, ends[1], head, costs[1], software),
        tied=tied,
        sequence_length=sequence_length,
        divided=tuple(_divided(module, plan)),
        splits_sequence=plan.sequence is not None and len(parts.blocks) == 1,
        uncut=plan.why_not.get("pipeline", ""),
    )


@dataclass
class _Layer:
    """A kind of layer: what it was called with, and what was seen of it."""

    module: nn.Module
    args: Any
    kwargs: Any
    output: Any
    crossing: float
    trace: Trace = field(default_factory=Trace)
    experts: ExpertShape | None = None


class _Tracing:
    """One run.

    Attributes:
        names: Of the layers, in order.
        order: The kind of each, a place in ``layers``.
        layers: The kinds.
        input: What was seen before the layers.
        head: What was seen behind them.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ParallelPlan,
        parts: ModelParts,
        *,
        samples: int,
        precision: Precision,
        software: Software,
        on_cpu: bool,
    ) -> None:
        self.names = [layer.name for layer in layers_of(module, parts.blocks)]
        self.order: list[int] = []
        self.layers: list[_Layer] = []
        self.input, self.head = Trace(), Trace()
        self._kinds: dict[object, int] = {}
        self._samples, self._precision, self._software, self._on_cpu = samples, precision, software, on_cpu
        self._module, self._plan = module, plan
        self._running = ""

    def follow(self, run: Run) -> None:
        """Run the model, and its kinds of layers alone.

        Raises:
            ValueError: It does not run, or not through all layers in order.
        """
        with ExitStack() as stack:
            stack.enter_context(without_data())
            model = self._without_values()
            weights = _weights(self._module, self._plan)
            own = {id(p): name for name, p in self._module.named_parameters()}
            keys = {storage_key(model.get_parameter(name)): weights.get(key, Weight()) for key, name in own.items()}
            sizes = [p.shape for p in model.parameters() if p.dim() > 1]
            recorder = Recorder(keys, sizes=sizes, samples=self._samples, norm_reads=self._software.norm_reads)
            if self._precision.casts:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            if not self._on_cpu:
                stack.enter_context(as_on_accelerators())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(recorder)
            for name in self.names:
                self._watch(model, name, recorder)
            for name, child in model.named_modules():
                child.register_forward_pre_hook(lambda _module, _args, name=name: setattr(self, "_running", name))
            recorder.trace = self.input
            try:
                with recorder.keeping(self.input), recorder.keeping(self.head):
                    run(model, self._samples)
                recorder.trace = None
                for layer in self.layers:
                    self._alone(layer, recorder)
            except Exception as error:
                raise ValueError(
                    f"the forward of {type(self._module).__name__} could not be followed without data: it stopped in "
                    f"'{self._running}' ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); give its sizes "
                    "instead (ptdp plan --layers 24 --hidden 2048 --heads 16 --sequence 2048)"
                ) from error
            if len(self.order) != len(self.names):
                raise ValueError(
                    f"the forward of {type(self._module).__name__} called {len(self.order)} of its {len(self.names)} layers: give an "
                    "example= that goes through all of them"
                )

    def _without_values(self) -> nn.Module:
        model = without_tensors(self._module).train()
        half = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(self._precision.name)
        made = dict[int, nn.Parameter]()
        for child in model.modules():
            for key, p in child._parameters.items():
                if p is not None:
                    dtype = half or p.dtype
                    empty = nn.Parameter(torch.empty(p.shape, dtype=dtype, device="cpu"), p.requires_grad)
                    child._parameters[key] = made.setdefault(id(p), empty)
            for key, b in child._buffers.items():
                if b is not None:
                    child._buffers[key] = torch.empty(b.shape, dtype=b.dtype, device="cpu")
        return model

    def _watch(self, model: nn.Module, name: str, recorder: Recorder) -> None:
        module = model.get_submodule(name)
        forward = module.forward
        for child in module.modules():
            if Experts().fits(child):
                vars(child)["forward"] = _visited.__get__(child)

        def watched(*args: Any, **kwargs: Any) -> Any:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            shapes = tuple((leaf.shape, leaf.dtype) for leaf in given)
            own = tuple((key, p.shape, p.dtype) for key, p in module.named_parameters())
            key = (type(module), own, shapes)
            recorder.trace = None
            if key not in self._kinds:
                self._kinds[key] = len(self.layers)
                crossing = sum(leaf.nbytes for leaf in given if leaf.requires_grad)
                self.layers.append(_Layer(module, args, kwargs, forward(*args, **kwargs), crossing))
                vars(module)["forward"] = forward
            layer = self.layers[self._kinds[key]]
            self.order.append(self._kinds[key])
            recorder.trace = self.head if len(self.order) == len(self.names) else self.input
            return tree_map(lambda leaf: _like(leaf) if isinstance(leaf, Tensor) else leaf, layer.output)

        vars(module)["forward"] = watched

    def _alone(self, layer: _Layer, recorder: Recorder) -> None:
        """Run a layer with its backward."""
        args, kwargs = tree_map(lambda leaf: _like(leaf) if isinstance(leaf, Tensor) else leaf, (layer.args, layer.kwargs))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for child in layer.module.modules():
            layer.experts = layer.experts or _experts(child)
        recorder.trace = layer.trace
        with recorder.keeping(layer.trace):
            outputs = [leaf for leaf in tree_leaves(layer.module(*args, **kwargs)) if isinstance(leaf, Tensor)]
            outputs = [leaf for leaf in outputs if leaf.requires_grad]
        recorder.trace = None
        gradients = [torch.empty_like(leaf) for leaf in outputs]
        recorder.trace, recorder.is_backward = layer.trace, True
        wanted = [*given, *(p for p in layer.module.parameters() if p.requires_grad)]
        torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
        recorder.trace, recorder.is_backward = None, False


def _like(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor.detach()
    return torch.empty_like(tensor.detach()).requires_grad_()


def _visited(module: nn.Module, x_nh: Tensor, index_nk: Tensor, weights_nk: Tensor) -> Tensor:
    """Needs no values, of which it depends what goes where."""
    vars(module)["_visits"] = (index_nk.size(-1), x_nh.size(-1))
    return x_nh * weights_nk.sum(-1, keepdim=True).to(x_nh.dtype)


def _experts(module: nn.Module) -> ExpertShape | None:
    """Of a module of experts that was called."""
    if "_visits" not in vars(module):
        return None
    chosen, hidden = vars(module)["_visits"]
    sizes = {name: p.shape for name, p in module.named_parameters()}
    # The matrix back to h is the smaller one, or as large as the one there.
    matrices = sorted(shape.numel() // shape[0] for shape in sizes.values() if len(shape) > 2)
    return ExpertShape(
        number=next(iter(sizes.values()))[0],
        chosen=chosen,
        hidden=hidden,
        width=matrices[0] // hidden,
        gated=sum(matrices) > 2 * matrices[0],
        bias=any(len(shape) == 2 for shape in sizes.values()),
    )


def _layer(few: _Layer, many: _Layer, software: Software) -> LayerShape:
    trace = few.trace
    amounts = (trace.forward, trace.backward)
    if software.elementwise == "compiled":
        amounts = (trace.operands, [2 * amount for amount in trace.operands])
    forward, backward = (Bytes(alike=alike / _FEW, split=split / _FEW) for alike, split in amounts)
    router = None if few.experts is None else (few.experts.number, few.experts.hidden)
    return LayerShape(
        products=tuple(one for one in trace.products if (one.outputs, one.inputs) != router),  # it goes with the experts
        attentions=tuple(trace.attentions),
        forward=forward,
        backward=backward,
        kept=_kept(trace, many.trace),
        crossing=few.crossing / _FEW,
        parameters=Parameters(),
        gated=trace.gated,
        experts=few.experts,
    )


def _kept(few: Trace, many: Trace) -> Bytes:
    """A straight line through both."""

    def total(trace: Trace, divided: bool) -> int:
        return sum(nbytes for nbytes, split in trace.kept.values() if split is divided)

    each = [(total(many, divided) - total(few, divided)) / (_MANY - _FEW) for divided in (False, True)]
    once = sum(total(few, divided) - _FEW * one for divided, one in zip((False, True), each, strict=True))
    return Bytes(alike=each[0], split=each[1], once=max(0.0, once))


def _end(
    few: Trace, many: Trace, parameters: Parameters, table: nn.Parameter | None, cost: float, software: Software
) -> EndShape:
    forward = few.forward if software.elementwise != "compiled" else few.operands
    logits = few.products[-1] if few.products else None
    kept = _kept(few, many)
    if logits is not None:
        # Those of the logits' size are counted with the loss (activations.py).
        size = logits.rows * logits.outputs
        few, many = (
            replace(one, kept={k: v for k, v in one.kept.items() if v[0] < size * n}) for one, n in ((few, _FEW), (many, _MANY))
        )
        kept = _kept(few, many)
    return EndShape(
        products=tuple(few.products),
        forward=Bytes(alike=forward[0] / _FEW, split=forward[1] / _FEW),
        backward=Bytes(alike=2 * forward[0] / _FEW, split=2 * forward[1] / _FEW),
        kept=kept,
        parameters=parameters,
        table=(0, 0) if table is None else (table.size(0), table.numel() // table.size(0)),
        cost=cost,
    )


def _kinds(module: nn.Module, plan: ParallelPlan) -> dict[str, Kind]:
    return plan.resolve(module) if plan.tensor else {}


def _weights(module: nn.Module, plan: ParallelPlan) -> dict[int, Weight]:
    """By the ``id`` of each parameter of the module."""
    found = dict[int, Weight]()
    for name, kind in _kinds(module, plan).items():
        child = module.get_submodule(name)
        own = dict(child.named_parameters())
        if isinstance(kind, Vocabulary):
            found |= {id(p): Weight(split=True, table=True) for p in own.values()}
        elif isinstance(kind, Column):
            copied, least = _copied(kind, child)
            found |= {id(p): Weight(split=True, copied=copied, least=least) for p in own.values()}
        elif isinstance(kind, Row):
            found |= {id(own["weight"]): Weight(split=True)}
        elif isinstance(kind, AttentionKind):
            names = ("in_proj_weight", "in_proj_bias", "out_proj.weight")
            found |= {id(own[key]): Weight(split=True) for key in names if key in own}
        elif isinstance(kind, Region):
            found |= {id(own[key]): Weight(split=True) for key in kind.per_head if key in own}
    return found


def _copied(kind: Column, module: nn.Module) -> tuple[int, int]:
    """Of a column layer's outputs those of key and value heads, and how many of them a rank has at least."""
    if not kind.copy_heads or not isinstance(kind.heads, tuple):
        return 0, 0
    outputs, _ = output_input_sizes(module)
    parts, fewest = kind.parts or (outputs,), min(kind.heads)
    copied = [(part, part // count) for part, count in zip(parts, kind.heads, strict=True) if count == fewest]
    if len(copied) == len(parts) > 1:  # as many heads of each: none is copied before all are
        copied = copied[1:]
    return sum(part for part, _ in copied), sum(least for _, least in copied)


def _parameters(parameters: Iterable[nn.Parameter], weights: dict[int, Weight], module: nn.Module) -> Parameters:
    whole = split = copied = 0
    heads = 1
    for p in dict.fromkeys(parameters):
        weight = weights.get(id(p), Weight())
        if not weight.split:
            whole += p.numel()
        elif weight.copied:
            outputs = max(size for size in p.shape if size >= weight.copied)
            some = p.numel() * weight.copied // outputs
            copied, split, heads = copied + some, split + p.numel() - some, max(1, weight.copied // weight.least)
        else:
            split += p.numel()
    return Parameters(whole=whole, split=split, copied=copied, heads=heads)


def _counted(module: nn.Module, plan: ParallelPlan, parts: ModelParts) -> dict[str, Parameters]:
    """Of each layer, by its name; experts are not among them."""
    weights, found = _weights(module, plan), dict[str, Parameters]()
    seen = set[int]()
    for layer in layers_of(module, parts.blocks):
        child = module.get_submodule(layer.name)
        of_experts = {id(p) for one in child.modules() if Experts().fits(one) for p in one.parameters()}
        own = [p for p in child.parameters() if id(p) not in of_experts and id(p) not in seen]
        seen |= {id(p) for p in own}
        found[layer.name] = _parameters(own, weights, module)
    return found


def _tables(module: nn.Module, plan: ParallelPlan, parts: ModelParts) -> tuple[nn.Parameter | None, nn.Parameter | None, bool]:
    """The largest vocabulary-parallel table of each end, and whether they are one."""
    found: list[list[nn.Parameter]] = [[], []]
    for name, kind in _kinds(module, plan).items():
        weight = getattr(module.get_submodule(name), "weight", None)
        if isinstance(kind, Vocabulary) and isinstance(weight, nn.Parameter):
            behind = any(f"{name}.".startswith(f"{top}.") for top in parts.after)
            found[behind].append(weight)
    first, head = (max(tables, key=lambda table: table.numel(), default=None) for tables in found)
    return first, head, head is not None and head is first


def _divided(module: nn.Module, plan: ParallelPlan) -> Sequence[Divided]:
    """What t has to divide."""
    found = Counter[Divided]()
    for name, kind in _kinds(module, plan).items():
        child, short = module.get_submodule(name), name.rpartition(".")[2]
        if isinstance(kind, Column):
            outputs, _ = output_input_sizes(child)
            parts = kind.parts or (outputs,)
            heads = kind.heads if isinstance(kind.heads, tuple) else (None,) * len(parts)
            for part, count in zip(parts, heads, strict=True):
                found[
                    Divided(
                        name=f"heads of {short}" if count else f"outputs of {short}",
                        size=count or part,
                        copied=bool(count) and kind.copy_heads,
                    )
                ] += 1
        elif isinstance(kind, Row):
            found[Divided(name=f"inputs of {short}", size=output_input_sizes(child)[1])] += 1
        elif isinstance(child, nn.MultiheadAttention):
            found[Divided(name="num_heads", size=child.num_heads)] += 1
        elif isinstance(kind, Region) and kind.heads is not None:
            found[Divided(name=f"heads of {short}", size=kind.heads)] += 1
    return tuple(found) or (Divided(name="modules that a plan shards", size=1),)
