"""A model's forward without data, and its blocks alone with their backward.

Each kind of block runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.base.errors import one_line
from lightning_ptdp.base.nested import iterate_tensors, map_tensors
from lightning_ptdp.base.torch_calls import Replacing
from lightning_ptdp.parameters.structure_copies import without_tensors
from lightning_ptdp.planner.operation_recorder import OperationRecorder, Trace, Weight
from lightning_ptdp.planner.shapes import ExpertShape
from lightning_ptdp.planner.software import Precision, Software
from lightning_ptdp.shims.quantization import make_dense
from lightning_ptdp.shims.torch import storage_key, without_data
from lightning_ptdp.tensor_parallel import Experts

Run = Callable[[nn.Module, int], object]
"""Calls a module with a batch of a given number of samples."""


@dataclass
class TracedLayer:
    """A kind of layer, with the arguments of its call and the trace."""

    module: nn.Module
    args: Any
    kwargs: Any
    output: Any
    crossing: float
    trace: Trace = field(default_factory=Trace)
    experts: ExpertShape | None = None


@dataclass(kw_only=True)
class LayerTracer:
    """One traced run of a model.

    Attributes:
        module: The model, which stays unchanged.
        names: Names of the layers, in order.
        weights: Division of the parameters by their ``id``.
        full_sequence: Names of the modules that read the full sequence under sequence parallelism.
        samples: Number of samples in the batch.
        precision: Precision of the counted bytes.
        software: Software whose reads and writes are counted.
        on_cpu: Whether the model runs on CPUs.
        order: Kind of each layer, an index in ``layers``.
        layers: Kinds of layers.
        input: Trace of the operations before the layers.
        head: Trace of the operations after the layers.
    """

    module: nn.Module
    names: Sequence[str]
    weights: Mapping[int, Weight]
    full_sequence: Sequence[str]
    samples: int
    precision: Precision
    software: Software
    on_cpu: bool
    order: list[int] = field(default_factory=list)
    layers: list[TracedLayer] = field(default_factory=list)
    input: Trace = field(default_factory=Trace)
    head: Trace = field(default_factory=Trace)
    _kinds: dict[object, int] = field(default_factory=dict)
    _running: str = ""

    def follow(self, run: Run) -> None:
        """Run the model, and each kind of its layers alone.

        Raises:
            ValueError: The model does not run, or not through all layers in order.
        """
        # before the context, which would convert gradients, and refuses those of other dtypes
        model = without_tensors(self.module).train()
        with ExitStack() as stack:
            stack.enter_context(without_data())
            make_dense(model)
            self._fill(model)
            replace_modules(model)
            recorder = OperationRecorder(
                {
                    storage_key(model.get_parameter(name)): self.weights.get(id(p), Weight())
                    for name, p in self.module.named_parameters()
                },
                sizes=[p.shape for p in model.parameters() if p.dim() > 1],
                samples=self.samples,
                software=self.software,
            )
            if self.precision.casts:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            stack.enter_context(replaced_functions(recorder, on_cpu=self.on_cpu))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(recorder)
            self._watch_all(model, recorder)
            recorder.trace = self.input
            try:
                with recorder.keeping(self.input, self.head):
                    run(model, self.samples)
                recorder.trace = None
                for layer in self.layers:
                    _run_alone(layer, recorder)
            except Exception as error:
                raise ValueError(
                    f"the forward of {type(self.module).__name__} cannot be traced without data: "
                    f"'{self._running}' failed ({type(error).__name__}: {one_line(error)}). Give "
                    "the sizes of the model instead (ptdp plan --layers 24 --hidden 2048 --heads 16 "
                    "--sequence 2048)"
                ) from error
            if len(self.order) != len(self.names):
                raise ValueError(
                    f"the forward of {type(self.module).__name__} called {len(self.order)} of "
                    f"its {len(self.names)} layers. Pass an example= that uses all of them"
                )

    def _watch_all(self, model: nn.Module, recorder: OperationRecorder) -> None:
        for name in self.names:
            self._watch(model.get_submodule(name), recorder)
        for name, child in model.named_modules():
            child.register_forward_pre_hook(
                lambda _module, _args, name=name: setattr(self, "_running", name)
            )
        for name in self.full_sequence:
            child = model.get_submodule(name)
            child.register_forward_pre_hook(lambda *_: setattr(recorder, "full_sequence", True))
            child.register_forward_hook(lambda *_: setattr(recorder, "full_sequence", False))

    def _fill(self, model: nn.Module) -> None:
        """Give the model tensors without values."""
        half = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(self.precision.name)
        replacements = dict[int, nn.Parameter]()
        for child in model.modules():
            for key, p in child._parameters.items():
                if p is not None:
                    empty = nn.Parameter(
                        torch.empty(p.shape, dtype=half or p.dtype, device="cpu"), p.requires_grad
                    )
                    child._parameters[key] = replacements.setdefault(id(p), empty)
            for key, b in child._buffers.items():
                if b is not None:
                    child._buffers[key] = torch.empty(b.shape, dtype=b.dtype, device="cpu")

    def _watch(self, module: nn.Module, recorder: OperationRecorder) -> None:
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            inputs = list(iterate_tensors((args, kwargs)))
            shapes = tuple((leaf.shape, leaf.dtype) for leaf in inputs)
            parameters = tuple((key, p.shape, p.dtype) for key, p in module.named_parameters())
            key = (type(module), parameters, shapes)
            recorder.write(inputs)
            recorder.trace = None
            if key not in self._kinds:
                self._kinds[key] = len(self.layers)
                crossing = sum(leaf.nbytes for leaf in inputs if leaf.requires_grad)
                self.layers.append(
                    TracedLayer(module, args, kwargs, forward(*args, **kwargs), crossing)
                )
                vars(module)["forward"] = forward
            layer = self.layers[self._kinds[key]]
            self.order.append(self._kinds[key])
            recorder.trace = self.head if len(self.order) == len(self.names) else self.input
            return _like(layer.output)

        vars(module)["forward"] = watched


def _run_alone(layer: TracedLayer, recorder: OperationRecorder) -> None:
    """Run a layer with its backward."""
    args, kwargs = _like((layer.args, layer.kwargs))
    inputs = [leaf for leaf in iterate_tensors((args, kwargs)) if leaf.requires_grad]
    for child in layer.module.modules():
        layer.experts = layer.experts or _experts(child)
    recorder.trace = layer.trace
    with recorder.keeping(layer.trace):
        results = list(iterate_tensors(layer.module(*args, **kwargs)))
        outputs = [leaf for leaf in results if leaf.requires_grad]
        recorder.write(outputs)
    recorder.trace = None
    grad_outputs = [torch.empty_like(leaf) for leaf in outputs]
    recorder.trace = layer.trace
    recorder.is_backward = True
    sources = [*inputs, *(p for p in layer.module.parameters() if p.requires_grad)]
    if outputs:  # a frozen layer of a teacher has none
        gradients = torch.autograd.grad(outputs, sources, grad_outputs, allow_unused=True)
        recorder.write(gradient for gradient in gradients[: len(inputs)] if gradient is not None)
    recorder.trace = None
    recorder.is_backward = False


def _like(values: Any) -> Any:
    """Return the values with new tensors that have no history.

    Objects without tensors are kept, because their classes may not be made from their content.
    """

    def new(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor.detach()
        return torch.empty_like(tensor.detach()).requires_grad_()

    if type(values) is tuple:
        return tuple(map(_like, values))
    if type(values) is dict:
        return {key: _like(value) for key, value in values.items()}
    return map_tensors(values, new) if any(True for _ in iterate_tensors(values)) else values


def _experts(module: nn.Module) -> ExpertShape | None:
    """Return the shape of a module of experts that was called, or None."""
    if "_visits" not in vars(module):
        return None
    chosen, hidden = vars(module)["_visits"]
    sizes = {name: p.shape for name, p in module.named_parameters()}
    # The matrix back to h is the smaller one, or as large as the other one.
    matrices = sorted(shape.numel() // shape[0] for shape in sizes.values() if len(shape) > 2)
    return ExpertShape(
        number=next(iter(sizes.values()))[0],
        chosen=chosen,
        hidden=hidden,
        width=matrices[0] // hidden,
        gated=sum(matrices) > 2 * matrices[0],
        bias=any(len(shape) == 2 for shape in sizes.values()),
    )


# ---- Single operations that replace several operations while a model is traced -------------------
#
# A replacement reads, writes and keeps as much as the operations that it replaces.


def replaced_functions(recorder: OperationRecorder, *, on_cpu: bool) -> Replacing:
    """Return a mode with attention as one operation.

    On accelerators, dropout keeps one byte per element.
    """
    replaced: dict[Callable[..., Any], Callable[..., Any]] = {
        nn.functional.scaled_dot_product_attention: partial(_attend, recorder)
    }
    if not on_cpu:
        replaced[nn.functional.dropout] = _drop
    return Replacing(replaced)


def _attend(
    recorder: OperationRecorder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: object,
) -> Tensor:
    causal = is_causal and attn_mask is None
    recorder.attention(query, key, value, causal=causal, dropout=dropout_p > 0)
    return _Attention.apply(recorder, query, key, value)


def _drop(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input


def replace_modules(model: nn.Module) -> None:
    """Let the model's RMSNorms and experts run in one operation each."""
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            vars(module)["forward"] = _normed.__get__(module)
        elif Experts().fits(module):
            vars(module)["forward"] = _visited.__get__(module)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorder: Any, *inputs: Tensor) -> Tensor:
        query, _, value = inputs
        ctx.save_for_backward(*inputs)
        ctx.recorder = recorder
        samples, heads, positions, _ = query.shape
        # The heads of a position are neighbours, as in the results of fused kernels.
        return query.new_empty(samples, positions, heads, value.size(3)).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.recorder.end_pass([gradient])
        return None, *(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


class _Visit(torch.autograd.Function):
    """Use shapes only, because routing depends on values that fake tensors lack."""

    @staticmethod
    def forward(ctx: Any, x_nh: Tensor, weights_nk: Tensor) -> Tensor:
        ctx.save_for_backward(x_nh, weights_nk)
        return torch.empty_like(x_nh)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def _visited(
    module: nn.Module, x_nh: Tensor, index_nk: Tensor, weights_nk: Tensor, **_: object
) -> Tensor:
    vars(module)["_visits"] = (index_nk.size(-1), x_nh.size(-1))
    return _Visit.apply(x_nh, weights_nk)


def _normed(module: nn.RMSNorm, x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, module.normalized_shape, module.weight)
