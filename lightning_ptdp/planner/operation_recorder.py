"""Recorder of a forward and its backward on tensors without data.

It records products, attention, bytes read and written, and bytes kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ptdp.base.nested import iterate_tensors
from lightning_ptdp.planner.shapes import AttentionShape, Product
from lightning_ptdp.planner.software import Software
from lightning_ptdp.shims.torch import storage_key

_aten = torch.ops.aten
_CONVOLUTION = _aten.convolution.default
_PRODUCTS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _CONVOLUTION,
    _aten.convolution_backward.default,
)
_NORM = _aten.native_layer_norm.default
_NORM_BACKWARD = _aten.native_layer_norm_backward.default
_ELEMENTWISE = (_aten.native_dropout.default, _aten._to_copy.default, _aten.copy_.default)
"""Operations on single elements that torch does not mark as such."""
_CREATING = (
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.zeros_like.default,
)
_RESULTS = ("out", "grad_input")
"""Arguments that operations write and do not read."""


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

    Bytes are separated by whether t divides them: [replicated, split].

    Attributes:
        products: Products in the order of the forward.
        attentions: Attentions in the order of the forward.
        forward: Bytes read and written between products.
        backward: Bytes read and written between products of the backward.
        kept: Bytes of each kept storage by its key, and whether t divides it.
        gated: Whether a gate was found.
    """

    products: list[Product] = field(default_factory=list)
    attentions: list[AttentionShape] = field(default_factory=list)
    forward: list[float] = field(default_factory=lambda: [0.0, 0.0])
    backward: list[float] = field(default_factory=lambda: [0.0, 0.0])
    kept: dict[int, tuple[int, bool]] = field(default_factory=dict)
    gated: bool = False


class OperationRecorder(TorchDispatchMode):
    """A dispatch mode that records operations in ``trace``, unless that is None.

    A tensor is split if t divides its contents. Products with a split weight turn replicated
    tensors into split ones, and split tensors into replicated ones. Every other operation passes on
    the state of its inputs.

    Operations between two products may be one pass (``elementwise``). A pass reads each tensor
    once, and writes only what is read after it or kept for the backward.

    Args:
        weights: Division of each parameter by its storage key.
        sizes: Sizes of the parameters.
        samples: Number of samples in the batch.
        software: Software whose reads and writes are counted.

    Attributes:
        trace: Record of the running part.
        is_backward: Whether its backward runs.
        full_sequence: Whether the running module reads the full sequence under sequence
            parallelism.
    """

    def __init__(
        self,
        weights: Mapping[int, Weight],
        *,
        sizes: Iterable[Sequence[int]],
        samples: int,
        software: Software,
    ) -> None:
        super().__init__()
        self.trace: Trace | None = None
        self.is_backward = self.full_sequence = False
        self._sizes = {tuple(sorted(size)) for size in sizes}
        self._weights = weights
        self._samples = samples
        self._software = software
        self._split = {key for key, weight in weights.items() if weight.split}
        self._of_weights = dict(weights)
        self._cores = set[int]()
        self._entered = set[int]()
        self._alive = list[object]()
        # what the running pass has read and made, and what no pass has written yet
        self._read = set[tuple[int, int]]()
        self._made = set[int]()
        self._unwritten = dict[int, int]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        inputs = list(iterate_tensors((args, kwargs)))
        outputs = list(iterate_tensors(result))
        # prevents the reuse of storage keys
        self._alive += [tensor.untyped_storage() for tensor in (*inputs, *outputs)]
        keys = [storage_key(tensor) for tensor in inputs]
        changes = function._schema.is_mutable
        new = [tensor for tensor in outputs if changes or storage_key(tensor) not in keys]
        split = self._is_split(function, inputs, keys)
        # a cast or another form of a parameter
        if new and inputs and all(key in self._of_weights for key in keys):
            for tensor in new:
                self._of_weights[storage_key(tensor)] = self._of_weights[keys[0]]
                if keys[0] in self._split:
                    self._split.add(storage_key(tensor))
            return result
        if split:
            self._split |= {storage_key(tensor) for tensor in new}
        if self.trace is None or not new or function in _CREATING:
            return result
        if function in _PRODUCTS:
            self.end_pass(inputs)
            if not self.is_backward:
                self.trace.products.append(self._product(function, inputs, new[0]))
        else:
            self.trace.gated |= function is _aten.silu.default
            unread = [kwargs.get(name) for name in _RESULTS]
            self._bytes(
                function, [tensor for tensor in inputs if all(tensor is not o for o in unread)], new
            )
        return result

    def _is_split(self, function: Any, inputs: list[Tensor], keys: list[int]) -> bool:
        marks = [key in self._split for key in keys]
        if function in (_aten.mm.default, _aten.addmm.default):
            return marks[-2] != marks[-1]
        if function in (_aten.embedding.default, _aten.embedding_dense_backward.default):
            return marks[0] and not self._weights.get(keys[0], Weight()).table
        return any(marks)

    def _bytes(self, function: Any, inputs: list[Tensor], new: list[Tensor]) -> None:
        """Count the bytes of an operation between products."""
        of_weight = tuple(sorted(new[0].shape)) in self._sizes
        if function is _aten._to_copy.default and self.is_backward and of_weight:
            return  # a weight's gradient is counted where it is accumulated
        read = [tensor for tensor in inputs if storage_key(tensor) not in self._of_weights]
        if function is _NORM:
            read += inputs[:1] * (self._software.norm_reads - 1)
        elif function is _NORM_BACKWARD:
            read += inputs[:2] * (2 * self._software.norm_reads - 2)
        joins = self._software.elementwise == "compiled" or (
            self._software.elementwise == "fused"
            and (torch.Tag.pointwise in function.tags or function in _ELEMENTWISE)
        )
        if not joins:
            self.end_pass(())
        for tensor in read:
            key = storage_key(tensor)
            place = key, int(tensor.storage_offset())
            if key not in self._made and place not in self._read:
                self.write([tensor])
                self._count(key, tensor.nbytes)
                if joins:
                    self._read.add(place)
        for tensor in new:
            key = storage_key(tensor)
            if joins:
                self._made.add(key)
                self._unwritten[key] = tensor.untyped_storage().nbytes()
            else:
                self._count(key, tensor.nbytes)

    def end_pass(self, needed: Iterable[Tensor]) -> None:
        """Begin a new pass, before which the ``needed`` tensors are written."""
        self._read.clear()
        self._made.clear()
        self.write(needed)

    def write(self, tensors: Iterable[Tensor]) -> None:
        """Count the writes of tensors that a pass has computed and not yet written."""
        for tensor in tensors:
            self._count(storage_key(tensor), self._unwritten.pop(storage_key(tensor), 0))

    def _count(self, key: int, nbytes: int) -> None:
        if self.trace is not None:
            amounts = self.trace.backward if self.is_backward else self.trace.forward
            amounts[key in self._split] += nbytes

    def _product(self, function: Any, inputs: list[Tensor], result: Tensor) -> Product:
        samples = self._samples
        if function is _CONVOLUTION:
            channels = result.size(1)
            rows = result.numel() // channels // samples
            return Product(rows=rows, outputs=channels, inputs=inputs[1][0].numel())
        left, right = inputs[-2:]
        outputs = right.size(-1)
        width = left.size(-1)
        keys = [storage_key(tensor) for tensor in (left, right)]
        split = (keys[0] in self._split, keys[1] in self._split)
        if right.dim() == 3:
            return Product(
                rows=left.size(0) * left.size(1) // samples,
                outputs=outputs,
                inputs=width,
                cut="rows" if any(split) else "none",
                weighted=False,
            )
        weight = self._of_weights.get(keys[1], Weight())
        enters = split == (False, True) and keys[0] not in self._entered
        if enters:
            self._entered.add(keys[0])
        cut: Any = {(False, True): "outputs", (True, True): "inputs"}.get(split, "none")
        return Product(
            rows=max(1, left.size(0) // samples),
            outputs=outputs,
            inputs=width,
            cut=cut,
            enters=enters,
            copied=weight.copied,
            least=weight.least,
            bias=len(inputs) > 2,
            full_sequence=self.full_sequence,
            weighted=keys[1] in self._of_weights,
        )

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, dropout: bool
    ) -> None:
        """Record the shape of an attention (b, heads, positions, channels).

        The planner itself counts its inputs and log-sum-exps (``sublayer_cost.py``).
        """
        self.end_pass((query, key, value))
        self._cores |= {storage_key(tensor) for tensor in (query, key, value)}
        if self.trace is not None:
            self.trace.attentions.append(
                AttentionShape(
                    queries=query.size(2),
                    keys=key.size(2),
                    heads=query.size(1),
                    kv_heads=key.size(1),
                    head_dim=query.size(3),
                    value_dim=value.size(3),
                    causal=causal,
                    dropout=dropout,
                )
            )

    @contextmanager
    def keeping(self, *traces: Trace) -> Iterator[None]:
        """Record the tensors that are kept for a backward, in the ``trace`` of their time.

        Parameters, their casts, and the tensors that attentions keep are left out.
        """

        def pack(tensor: Tensor) -> Tensor:
            key = storage_key(tensor)
            if key not in self._of_weights and self.trace is not None:
                self.write([tensor])
                self.trace.kept[key] = (tensor.untyped_storage().nbytes(), key in self._split)
                self._alive.append(tensor.untyped_storage())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        for trace in traces:
            for key in self._cores:
                trace.kept.pop(key, None)
