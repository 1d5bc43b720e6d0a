"""Calls of a step that combine samples, such as reductions and comparisons of all pairs."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.base.nested import iterate_tensors
from lightning_ptdp.base.torch_calls import CallMode, TorchCall, calling_line
from lightning_ptdp.engine.loss_graph import uses_samples
from lightning_ptdp.forward.token_mixing import ORDERING

_NAMES = (
    "amax amin log_softmax logsumexp max mean median min norm normalize prod softmax std std_mean "
    "sum var var_mean"
)
_REDUCING = frozenset(_NAMES.split())
"""Functions that reduce dimensions."""
_SPREADS = frozenset(("std", "std_mean", "var", "var_mean"))
"""Functions that depend on all samples in another way than by a sum."""
_DISTANCES = frozenset(("cdist", "pdist"))
_ROWS = frozenset(("__sub__", "cosine_similarity", "sub"))
_PAIRING = _DISTANCES | _ROWS | {"__matmul__", "corrcoef", "cov", "einsum", "matmul", "mm"}
"""Functions that may compare all pairs of samples, or of features over all samples."""


class SampleCalls(CallMode):
    """Notes the first function that reduces or compares the samples, along dimension 0.

    Dimension 0 of stacked tensors, such as the layers' outputs, is another one.

    Attributes:
        place: File, line and function.
    """

    def __init__(self, samples: int, *, own: Set[Tensor], two_views: bool) -> None:
        super().__init__()
        self.place: str | None = None
        self._samples = samples
        self._own = own
        self._compared = (samples, 2 * samples) if two_views else (samples,)
        self._stacks = set[Tensor]()

    def observe_call(self, call: TorchCall) -> Any:
        """Run a call, and note whether it reduces the samples."""
        if self.place is not None:
            return call.run()
        if self._reduces(call) or self._compares(call) or self._differentiates(call):
            # Metrics and experts add up the counts of all ranks. A loss has a gradient.
            is_loss = any(x.requires_grad for x in call.tensors())
            line = calling_line(*(() if is_loss else ("torchmetrics", "lightning_ptdp")))
            self.place = None if line is None else f"{line} computes the {call.name}"
        result = call.run()
        if isinstance(result, Tensor) and self._is_stack(call, result):
            self._stacks.add(result)
        return result

    def _reduces(self, call: TorchCall) -> bool:
        """Return True for a reduction of a row of each sample, or for losses that are ordered."""
        if call.name not in _REDUCING and call.name not in ORDERING:
            return False
        dims = call.dims()
        x = call.first
        if call.name in _SPREADS and not dims and isinstance(x, Tensor) and x.dim():
            return len(x) == self._samples > 1 and not self._is_other(x)
        if 0 not in dims or self._is_other(x) or x in self._stacks:
            return False
        if len(dims) < x.dim():
            return len(x) == self._samples > 1
        return call.name in ORDERING and x.requires_grad and len(x) % self._samples == 0

    def _compares(self, call: TorchCall) -> bool:
        """Return True for distances, products, differences or cosines between the rows of samples.

        All but distances are those of one or two views of the samples with themselves, or of two
        functions of the samples, or products of features with a sum over the samples.
        """
        if call.name not in _PAIRING:
            return False
        tensors = call.tensors()
        if self._samples < 2 or any(map(self._is_other, tensors)):
            return False
        if call.name in _DISTANCES:
            return all(x.dim() == 2 and len(x) == self._samples for x in tensors)
        if call.name in ("corrcoef", "cov"):
            return tensors[0].size(-1) == self._samples
        if len(tensors) != 2 or not tensors[0].requires_grad:
            return False
        x, y = tensors
        if call.name in _ROWS:
            # Rows (n, 1, h) with (1, n, h), unlike one row of each sample with its others.
            both = torch.broadcast_shapes(x.shape, y.shape) if _root(x) is _root(y) else x.shape
            rows = {*both[:1]} if max(x.numel(), y.numel()) < both.numel() else set()
            firsts = [len(one) if one.dim() == len(both) else 1 for one in (x, y)]
            pairs = both[:1] == both[1:2] and 1 in firsts
        elif call.name == "einsum":
            rows = {len(x)}
            pairs = len(x) == len(y) and _crosses_rows(call.first)
        else:
            pairs = x.dim() == 2 and y.shape == x.shape[::-1]
            sums_samples = pairs and x.size(1) == self._samples
            rows = {self._samples if sums_samples else len(x)}
        return pairs and not rows.isdisjoint(self._compared) and self._are_views(x, y)

    def _are_views(self, x: Tensor, y: Tensor) -> bool:
        """Return True for views of the same tensor, or if both depend on the samples."""
        nodes = (x.grad_fn, y.grad_fn)
        return _root(x) is _root(y) or all(
            node is not None and uses_samples(node, self._samples) for node in nodes
        )

    def _differentiates(self, call: TorchCall) -> bool:
        """Return True for gradients of parameters that samples share, and the loss may use.

        Adaptive weights of losses and first-order meta-learning use them without a graph.
        """
        if call.name != "grad":
            return False
        nodes = [x.grad_fn for x in iterate_tensors(call.argument(0, "outputs", ()))]
        return any(uses_samples(node, self._samples) for node in nodes) and any(
            map(self._is_own, iterate_tensors(call.argument(1, "inputs", ())))
        )

    def _is_own(self, x: Tensor) -> bool:
        """Return True for a weight or a buffer, and for views of it."""
        root = _root(x)
        return root in self._own or isinstance(root, nn.Parameter)

    def _is_other(self, x: Tensor) -> bool:
        """Return True for a weight or a buffer, and for the values of one of the samples."""
        root = _root(x)
        return self._is_own(x) or (
            x is not root
            and root.shape[:1] == (self._samples,)
            and x.numel() * self._samples == root.numel()
            and root.stride(0) not in x.stride()
        )

    def _is_stack(self, call: TorchCall, result: Tensor) -> bool:
        """Return True for rows of samples stacked along dimension 0, and for functions of these."""
        if call.name == "stack":
            is_first = call.argument(1, "dim", 0) == 0
            return is_first and result.dim() > 1 and result.size(1) == self._samples
        stacks = [x for x in call.args if isinstance(x, Tensor) and x in self._stacks]
        return any(x.shape == result.shape for x in stacks)


def _crosses_rows(equation: str) -> bool:
    """Return True if ``einsum`` of two tensors pairs their rows, or sums products over the rows."""
    inputs, _, result = equation.replace(" ", "").partition("->")
    one, _, other = inputs.partition(",")
    return bool(result) and (one[:1] != other[:1] or one[:1] not in result)


def _root(x: Tensor) -> Tensor:
    """Return the tensor of which ``x`` is a view, or ``x``."""
    return x if x._base is None else x._base
