"""Operations of a loss, read from its autograd graph.

Nodes are those of ``Tensor.grad_fn``. No function computes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

_SUM = 2  # by which torch's losses store their reduction
THROUGH = frozenset(
    ("AddBackward0", "ToCopyBackward0", "AliasBackward0", "ViewBackward0", "SqueezeBackward0")
)
SCALED = THROUGH | {"DivBackward0", "MulBackward0", "MeanBackward0", "StackBackward0"}
BETWEEN_NUMBERS = THROUGH | {"DivBackward0", "MulBackward0", "NegBackward0", "SubBackward0"}
_ELEMENTWISE = BETWEEN_NUMBERS | {
    *("AbsBackward0", "ExpBackward0", "LogBackward0", "PowBackward0", "SoftplusBackward0")
}
_OF_PARAMETERS = _ELEMENTWISE | {
    *("MmBackward0", "PermuteBackward0", "SliceBackward0", "TBackward0", "TransposeBackward0"),
    *("ClampMinBackward0", "ExpandBackward0", "LinalgVectorNormBackward0"),  # F.normalize
}
EXTREMES = MappingProxyType(
    {
        **dict.fromkeys(("Max", "Amax"), "maximum"),
        **dict.fromkeys(("Min", "Amin"), "minimum"),
        "Median": "median",
    }
)
_CURVED = frozenset(
    (
        *("Abs", "Clamp", "Exp", "Log", "Log10", "Log1P", "Log2", "Logsumexp", "LinalgVectorNorm"),
        *("Pow", "Prod", "Reciprocal", "Relu", "Rsqrt", "Sigmoid", "Softplus", "Sqrt", "Std"),
        *("Tanh", "Var"),
    )
)
"""Functions whose mean over microbatches is not that of the batch."""
_PARTS = frozenset(("Select", "Slice", "Split", "SplitWithSizes", "Unbind"))


def ends(node: Any, through: frozenset[str]) -> Iterator[Any]:
    """Yield the last operations of the loss, skipping those that do not change its meaning."""
    pending = [] if node is None else [node]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.name() not in through:
            yield node
            continue
        new = [one for one in reversed(_before(node)) if one not in seen]
        seen.update(new)
        pending += new


def is_sum(node: Any, samples: int) -> bool:
    """Return True if an operation sums over the samples."""
    adds = node.name() == "SumBackward0" or getattr(node, "_saved_reduction", None) == _SUM
    return bool(adds) and not _has_no_samples(node, summed_shape(node), samples)


def is_extreme(node: Any, samples: int) -> bool:
    """Return True for one maximum, minimum or median of all elements."""
    if function_of(node) not in EXTREMES:
        return False
    shape = summed_shape(node)
    dims = getattr(node, "_saved_dim", None)
    of_all = dims is None or len(shape) == 1 or (not isinstance(dims, int) and not dims)
    return of_all and shape.numel() > 1 and not _has_no_samples(node, shape, samples)


def numbers(loss: Tensor) -> Iterator[Any]:
    """Yield the operations of the loss on numbers, and those that reduce tensors to them."""
    return _ancestors(loss.grad_fn, lambda node: [one for one in _before(node) if not _shape(one)])


def _ancestors(node: Any, before: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    pending = [] if node is None else [node]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        new = {*before(node)} - seen
        seen |= new
        pending += new


def _shape(node: Any) -> torch.Size:
    """Return the shape of the first result of an operation."""
    return torch.Size(node._input_metadata[0].shape)


def is_curved(node: Any, samples: int) -> bool:
    """Return True if an operation is not linear in numbers of the samples."""
    before = [one for one, _ in node.next_functions]
    function = function_of(node)
    if function in ("Div", "Mul"):
        # A constant factor has no entry, or None.
        of_first = function == "Div" or uses_samples(before[0], samples)
        return len(before) > 1 and of_first and uses_samples(before[1], samples)
    return function in _CURVED and uses_samples(before[0], samples)


def uses_samples(node: Any, samples: int) -> bool:
    """Return True if an operation uses a tensor with the samples along dimension 0.

    The samples in a loop over them are parts of it.
    """

    def before(one: Any) -> list[Any]:
        is_part = function_of(one) in _PARTS and one._saved_dim == 0
        return [] if is_part else _before(one)

    return any(
        _shape(one)[:1] == (samples,)
        and not all(_is_parameter(end) for end in ends(one, _OF_PARAMETERS))
        for one in _ancestors(node, before)
    )


def _is_parameter(node: Any) -> bool:
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def function_of(node: Any) -> str:
    """Return the name of an operation's function, such as ``Mul``."""
    name: str = node.name()
    return name.partition("Backward")[0]


def _has_no_samples(node: Any, shape: torch.Size, samples: int) -> bool:
    """Return True if a reduction of ``shape`` is of parameters, or of stacked numbers.

    Numbers are those of terms of the loss, unless there are as many as samples.
    """

    def is_apart(node: Any) -> bool:
        if node.name() == "StackBackward0":
            return len(shape) == 1 and shape[0] != samples
        return _is_parameter(node) and node.variable.shape == shape

    return all(is_apart(end) for one in _before(node) for end in ends(one, _ELEMENTWISE))


def _before(node: Any) -> list[Any]:
    return [one for one, _ in node.next_functions if one is not None]


def compares_samples(node: Any) -> bool:
    """Return True for a cross-entropy over the samples themselves.

    Each sample has one view, or two (as in NT-Xent, without the sample's own logit).
    """
    if node.name() != "NllLossBackward0" or node._saved_self.dim() != 2:
        return False
    target: Tensor = node._saved_target
    rows, classes = node._saved_self.shape
    samples = rows if classes == rows else rows // 2
    if samples < 2 or classes not in (rows, rows - 1) or (classes < rows and rows % 2):
        return False
    return torch.equal(target, torch.arange(rows, device=target.device) % samples)


def summed_shape(node: Any) -> torch.Size:
    """Return the shape of the tensor whose elements a sum adds."""
    size = getattr(node, "_saved_self_sym_sizes", None)
    return torch.Size(node._saved_self.shape if size is None else size)
