"""A model's forward without data, and its blocks alone with their backward.

Each kind of block runs once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_ptdp.parameters.shadow import without_tensors
from lightning_ptdp.pipeline.containers import ModelParts, layers_of
from lightning_ptdp.planner.expert_shape import ExpertShape
from lightning_ptdp.planner.operation_recorder import OperationRecorder, Trace, Weight
from lightning_ptdp.planner.planned_parameters import split_weights
from lightning_ptdp.planner.precision_bytes import Precision
from lightning_ptdp.planner.software import Software
from lightning_ptdp.planner.stand_ins import replace_modules, replacing_functions
from lightning_ptdp.shims.quantization import make_dense
from lightning_ptdp.shims.torch import storage_key, without_data
from lightning_ptdp.tensor_parallel import ParallelPlan, Whole

Run = Callable[[nn.Module, int], object]
"""Calls a module with a batch of a given number of samples."""


@dataclass
class Followed:
    """A kind of layer, with the arguments of its call and the trace."""

    module: nn.Module
    args: Any
    kwargs: Any
    output: Any
    crossing: float
    trace: Trace = field(default_factory=Trace)
    experts: ExpertShape | None = None


class Following:
    """One traced run of a model.

    Attributes:
        names: Names of the layers, in order.
        order: Kind of each layer, an index in ``layers``.
        layers: Kinds of layers.
        input: Trace of the operations before the layers.
        head: Trace of the operations after the layers.
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
        self.layers: list[Followed] = []
        self.input = Trace()
        self.head = Trace()
        self._kinds: dict[object, int] = {}
        self._samples = samples
        self._precision = precision
        self._software = software
        self._on_cpu = on_cpu
        self._module = module
        self._plan = plan
        self._running = ""

    def follow(self, run: Run) -> None:
        """Run the model, and each kind of its layers alone.

        Raises:
            ValueError: The model does not run, or not through all layers in order.
        """
        # before the context, which would convert gradients, and refuses those of other dtypes
        model = without_tensors(self._module).train()
        with ExitStack() as stack:
            stack.enter_context(without_data())
            make_dense(model)
            self._fill(model)
            replace_modules(model)
            weights = split_weights(self._module, self._plan)
            parameter_names = {id(p): name for name, p in self._module.named_parameters()}
            storage_weights = {
                storage_key(model.get_parameter(name)): weights.get(key, Weight())
                for key, name in parameter_names.items()
            }
            recorder = OperationRecorder(
                storage_weights,
                sizes=[p.shape for p in model.parameters() if p.dim() > 1],
                samples=self._samples,
                elementwise=self._software.elementwise,
                norm_reads=self._software.norm_reads,
            )
            if self._precision.casts:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            stack.enter_context(replacing_functions(recorder, on_cpu=self._on_cpu))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(recorder)
            for name in self.names:
                self._watch(model, name, recorder)
            for name, child in model.named_modules():
                child.register_forward_pre_hook(
                    lambda _module, _args, name=name: setattr(self, "_running", name)
                )
            for name, kind in (
                self._plan.resolve(self._module) if self._plan.tensor else {}
            ).items():
                if isinstance(kind, Whole):
                    child = model.get_submodule(name)
                    child.register_forward_pre_hook(lambda *_: setattr(recorder, "whole", True))
                    child.register_forward_hook(lambda *_: setattr(recorder, "whole", False))
            recorder.trace = self.input
            try:
                with recorder.keeping(self.input, self.head):
                    run(model, self._samples)
                recorder.trace = None
                for layer in self.layers:
                    self._alone(layer, recorder)
            except Exception as error:
                raise ValueError(
                    f"the forward of {type(self._module).__name__} cannot be traced without data: "
                    f"'{self._running}' failed ({type(error).__name__}: "
                    f"{str(error).splitlines()[0] if str(error) else ''}). Give the sizes of the "
                    "model instead (ptdp plan --layers 24 --hidden 2048 --heads 16 --sequence 2048)"
                ) from error
            if len(self.order) != len(self.names):
                raise ValueError(
                    f"the forward of {type(self._module).__name__} called {len(self.order)} of "
                    f"its {len(self.names)} layers. Pass an example= that uses all of them"
                )

    def _fill(self, model: nn.Module) -> None:
        """Give the model tensors without values."""
        half = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(self._precision.name)
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

    def _watch(self, model: nn.Module, name: str, recorder: OperationRecorder) -> None:
        module = model.get_submodule(name)
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            shapes = tuple((leaf.shape, leaf.dtype) for leaf in inputs)
            parameters = tuple((key, p.shape, p.dtype) for key, p in module.named_parameters())
            key = (type(module), parameters, shapes)
            recorder.write(inputs)
            recorder.trace = None
            if key not in self._kinds:
                self._kinds[key] = len(self.layers)
                crossing = sum(leaf.nbytes for leaf in inputs if leaf.requires_grad)
                self.layers.append(
                    Followed(module, args, kwargs, forward(*args, **kwargs), crossing)
                )
                vars(module)["forward"] = forward
            layer = self.layers[self._kinds[key]]
            self.order.append(self._kinds[key])
            recorder.trace = self.head if len(self.order) == len(self.names) else self.input
            return tree_map(
                lambda leaf: _like(leaf) if isinstance(leaf, Tensor) else leaf, layer.output
            )

        vars(module)["forward"] = watched

    def _alone(self, layer: Followed, recorder: OperationRecorder) -> None:
        """Run a layer with its backward."""
        args, kwargs = tree_map(
            lambda leaf: _like(leaf) if isinstance(leaf, Tensor) else leaf,
            (layer.args, layer.kwargs),
        )
        inputs = [
            leaf
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        for child in layer.module.modules():
            layer.experts = layer.experts or _experts(child)
        recorder.trace = layer.trace
        with recorder.keeping(layer.trace):
            outputs = [
                leaf
                for leaf in tree_leaves(layer.module(*args, **kwargs))
                if isinstance(leaf, Tensor)
            ]
            outputs = [leaf for leaf in outputs if leaf.requires_grad]
            recorder.write(outputs)
        recorder.trace = None
        grad_outputs = [torch.empty_like(leaf) for leaf in outputs]
        recorder.trace = layer.trace
        recorder.is_backward = True
        sources = [*inputs, *(p for p in layer.module.parameters() if p.requires_grad)]
        gradients = torch.autograd.grad(outputs, sources, grad_outputs, allow_unused=True)
        recorder.write(gradient for gradient in gradients[: len(inputs)] if gradient is not None)
        recorder.trace = None
        recorder.is_backward = False


def _like(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor.detach()
    return torch.empty_like(tensor.detach()).requires_grad_()


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
