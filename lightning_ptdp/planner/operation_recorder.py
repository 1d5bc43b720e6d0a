"""Recorder of a forward and its backward on tensors without data.

It records products, attention, bytes read and written, and bytes kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_ptdp.planner.shapes import AttentionShape, Product
from lightning_ptdp.shims.torch import storage_key

__all__ = ["OperationRecorder", "Trace", "Weight", "as_on_accelerators"]

_aten = torch.ops.aten
_MATRIX = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)
_FUSED = (_aten._scaled_dot_product_flash_attention_for_cpu.default,)
_NORMS = (_aten.native_layer_norm.default, _aten._fused_rms_norm.default)
_BACKWARD = (
    _aten.convolution_backward.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Division of a parameter under a plan.

    Attributes:
        split: Whether t divides the parameter.
        table: Whether its rows are looked up.
        copied: Number of its outputs for key and value heads, of which each rank has at least
            ``least``.
        least: Least number of these outputs on a rank.
    """

    split: bool = False
    table: bool = False
    copied: int = 0
    least: int = 0


@dataclass
class Trace:
    """Record of one part of the model.

    Bytes are separated by whether t divides them: [alike, split].

    Attributes:
        products: Products in the order of the forward.
        attentions: Attentions in the order of the forward.
        forward: Bytes read and written between products.
        backward: Bytes read and written between products of the backward.
        operands: Bytes of the products' results and activations, which remain if all operations
            between two products are one pass.
        kept: Bytes of each kept storage by its key, and whether t divides it.
        gated: Whether a gate was found.
    """

    products: list[Product] = field(default_factory=list)
    attentions: list[AttentionShape] = field(default_factory=list)
    forward: list[float] = field(default_factory=lambda: [0.0, 0.0])
    backward: list[float] = field(default_factory=lambda: [0.0, 0.0])
    operands: list[float] = field(default_factory=lambda: [0.0, 0.0])
    kept: dict[int, tuple[int, bool]] = field(default_factory=dict)
    gated: bool = False


class OperationRecorder(TorchDispatchMode):
    """A dispatch mode that records operations in ``trace``, unless that is None.

    A tensor is split if t divides its contents. Products with a split weight turn whole tensors
    into split ones, and split tensors into whole ones. Every other operation passes on the state of
    its inputs.

    Args:
        weights: Division of each parameter by its storage key.
        sizes: Sizes of the parameters.
        samples: Number of samples in the batch.
        norm_reads: Number of times that a norm reads its input.
    """

    def __init__(
        self,
        weights: Mapping[int, Weight],
        *,
        sizes: Iterable[Sequence[int]],
        samples: int,
        norm_reads: int = 1,
    ) -> None:
        super().__init__()
        self._sizes = {tuple(sorted(size)) for size in sizes}
        self.trace: Trace | None = None
        self.is_backward = False
        self._weights, self._samples, self._norm_reads = weights, samples, norm_reads
        self._split = {key for key, weight in weights.items() if weight.split}
        self._of_weights = dict(weights)
        self._cores, self._entered, self._alive = set[int](), set[int](), list[object]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        # prevents the reuse of storage keys
        self._alive += [one.untyped_storage() for one in (*inputs, *outputs)]
        keys = [storage_key(one) for one in inputs]
        new = [one for one in outputs if storage_key(one) not in keys]
        split = self._is_split(function, inputs, keys)
        # a cast or another form of a parameter
        if new and inputs and all(key in self._of_weights for key in keys):
            for one in new:
                self._of_weights[storage_key(one)] = self._of_weights[keys[0]]
                self._split |= {storage_key(one)} & (
                    {storage_key(one)} if keys[0] in self._split else set()
                )
            return result
        for one in new:
            self._split |= {storage_key(one)} if split else set()
        if self.trace is not None and new:
            self._record(self.trace, function, args, kwargs or {}, inputs, new, split)
        return result

    def _is_split(self, function: Any, inputs: list[Tensor], keys: list[int]) -> bool:
        marks = [key in self._split for key in keys]
        if function in (_aten.mm.default, _aten.addmm.default):
            return marks[-2] != marks[-1]
        if function in (_aten.embedding.default, _aten.embedding_dense_backward.default):
            table = self._weights.get(keys[0])
            return marks[0] and not (table is not None and table.table)
        return any(marks)

    def _record(
        self,
        trace: Trace,
        function: Any,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        new: list[Tensor],
        split: bool,
    ) -> None:
        if function in _BACKWARD or (
            self.is_backward and (function in _MATRIX or function is _aten.convolution.default)
        ):
            return
        if (
            self.is_backward
            and function is _aten._to_copy.default
            and tuple(sorted(new[0].shape)) in self._sizes
        ):
            return  # a weight's gradient is counted where it is accumulated
        if function in _FUSED:
            self._attention(trace, args, kwargs, new)
        elif function in _MATRIX or function is _aten.convolution.default:
            operands = inputs[:2] if function is _aten.convolution.default else inputs[-2:]
            trace.products.append(self._product(function, operands, new[0], biased=len(inputs) > 2))
            for one in (operands[0], new[0]):
                trace.operands[storage_key(one) in self._split] += one.nbytes
        else:
            trace.gated |= function is _aten.silu.default
            read = [one for one in inputs if storage_key(one) not in self._of_weights]
            if function in _NORMS:
                read += inputs[:1] * (self._norm_reads - 1)
            amounts = trace.backward if self.is_backward else trace.forward
            for one in (*read, *new):
                amounts[storage_key(one) in self._split] += one.numel() * one.element_size()

    def _product(
        self, function: Any, operands: list[Tensor], result: Tensor, *, biased: bool
    ) -> Product:
        (left, right), samples = operands, self._samples
        keys = [storage_key(one) for one in operands]
        if function is _aten.convolution.default:
            rows = result.numel() // result.size(1) // samples
            return Product(rows=rows, outputs=result.size(1), inputs=right[0].numel())
        if right.dim() == 3:
            cut = any(key in self._split for key in keys)
            rows = left.size(0) * left.size(1) // samples
            return Product(
                rows=rows,
                outputs=right.size(2),
                inputs=left.size(2),
                cut="rows" if cut else "none",
                weighted=False,
            )
        weight = self._of_weights.get(keys[1], Weight())
        rows = max(1, left.size(0) // samples)
        there = (keys[0] in self._split, keys[1] in self._split)
        enters = there == (False, True) and keys[0] not in self._entered
        self._entered |= {keys[0]}
        return Product(
            rows=rows,
            outputs=right.size(1),
            inputs=left.size(1),
            cut={(False, True): "outputs", (True, True): "inputs"}.get(there, "none"),  # type: ignore[arg-type]
            enters=enters,
            copied=weight.copied,
            least=weight.least,
            bias=biased,
            weighted=keys[1] in self._of_weights,
        )

    def _attention(self, trace: Trace, args: Any, kwargs: Any, new: list[Tensor]) -> None:
        query, key, value = args[:3]
        causal = bool(args[4] if len(args) > 4 else kwargs.get("is_causal", False))
        mask = kwargs.get("attn_mask")
        trace.attentions.append(
            AttentionShape(
                queries=query.size(2),
                keys=key.size(2),
                heads=query.size(1),
                kv_heads=key.size(1),
                head_dim=query.size(3),
                value_dim=value.size(3),
                causal=causal and mask is None,
                dropout=False,
            )
        )
        # The planner itself counts inputs and log-sum-exps (attention_cost.py).
        self._cores |= {storage_key(one) for one in (query, key, value, *new[1:])}

    @contextmanager
    def keeping(self, trace: Trace) -> Iterator[None]:
        """Record the tensors that are kept for a backward.

        Parameters, their casts, and the tensors that attentions keep are left out.
        """

        def pack(tensor: Tensor) -> Tensor:
            key = storage_key(tensor)
            if key not in self._of_weights and self.trace is trace:
                trace.kept[key] = (tensor.untyped_storage().nbytes(), key in self._split)
                self._alive.append(tensor.untyped_storage())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        for key in self._cores:
            trace.kept.pop(key, None)


class as_on_accelerators(TorchFunctionMode):  # noqa: N801, it is used as a context
    """Dropout as on GPUs: it keeps one byte per element, and attention stays fused."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.nn.functional.scaled_dot_product_attention:
            args, kwargs = (
                args[:4],
                kwargs | ({"is_causal": args[5]} if len(args) > 5 else {}) | {"dropout_p": 0.0},
            )
        elif function is torch.nn.functional.dropout:
            rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            if (args[2] if len(args) > 2 else kwargs.get("training", True)) and not math.isclose(
                rate, 0.0
            ):
                return torch.native_dropout(args[0] if args else kwargs["input"], rate, True)[0]
        return function(*args, **kwargs)
