"""Logits that are split along the vocabulary but report the full shape.

They keep an unmodified ``training_step`` correct and cheap.

The tensor holds the local columns and reports the shape of the full logits. The usual operations of
losses work on the local part: reshaping, casting and indexing that keep the last dimension,
arithmetic with Python numbers and with each other, ``F.cross_entropy`` of class indices,
``argmax(-1)``, ``logsumexp(-1)``. Every other function first gathers the vocabulary
(differentiably) and continues with a plain tensor.

Gathering is collective over the tensor group: all its ranks must call it, which holds if they run
the same code. Operations in place would change a copy and are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ptdp.base.nested import map_tensors
from lightning_ptdp.base.torch_calls import TorchCall
from lightning_ptdp.tensor_parallel.collectives import gather_last, start_all_gather
from lightning_ptdp.tensor_parallel.cross_entropy import (
    LogSumExp,
    Reduction,
    vocabulary_parallel_cross_entropy,
)
from lightning_ptdp.tensor_parallel.tensor_shards import VocabularyRange
from lightning_ptdp.world.mesh import Group


class VocabularyParallelLogits(torch.Tensor):
    """This rank's columns of logits (..., V); created by ``wrap``.

    Attributes:
        vocabulary: Range of the local columns.
        group: The tensor group.
    """

    vocabulary: VocabularyRange
    group: Group

    @staticmethod
    def wrap(
        local: Tensor, *, vocabulary: VocabularyRange, group: Group
    ) -> VocabularyParallelLogits:
        """Wrap local logits (..., ceil(V/t)) as logits (..., V)."""
        assert local.size(-1) == vocabulary.rows, (tuple(local.shape), vocabulary)
        logits = local.as_subclass(VocabularyParallelLogits)
        logits.vocabulary = vocabulary
        logits.group = group
        return logits

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping | None = None
    ) -> object:
        call = _LogitsCall(func, args, kwargs or {})
        handler = _HANDLERS.get(call.subject)
        if handler is not None and isinstance(call.first, cls):
            result = handler(call)
            if result is not NotImplemented:
                return result
        _refuse_in_place(call)
        args, kwargs = gather_full((call.args, call.kwargs))
        return func(*args, **kwargs)


def gather_full(outputs: object) -> Any:
    """Replace split logits with plain full logits (..., V), at any depth of nesting.

    Searches tuples, lists, mappings and dataclasses. Collective over the tensor group if there are
    split logits. Differentiable, if every rank then runs the same computation.
    """
    return map_tensors(outputs, _full)


def local_logits(logits: Tensor) -> tuple[Tensor, VocabularyRange, Group]:
    """Return the local columns, their range, and the ranks that hold the other columns.

    Logits that are not split have all columns and a group of one.
    """
    if isinstance(logits, VocabularyParallelLogits):
        return _local(logits), logits.vocabulary, logits.group
    return logits, VocabularyRange(size=logits.size(-1)), Group()


def _full(x: Tensor) -> Tensor:
    if not isinstance(x, VocabularyParallelLogits):
        return x
    # Contiguous like the output of a head, because users call view() on it.
    return gather_last(_local(x), x.group)[..., : x.vocabulary.size].contiguous()


def _local(logits: VocabularyParallelLogits) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return logits.as_subclass(torch.Tensor)


class _LogitsCall(TorchCall):
    """A call of a function of torch whose first argument is split logits."""

    @property
    def logits(self) -> VocabularyParallelLogits:
        """Return the first argument."""
        logits = self.first
        assert isinstance(logits, VocabularyParallelLogits)
        return logits

    @property
    def local(self) -> Tensor:
        """Return the local columns."""
        return _local(self.logits)

    @property
    def full(self) -> Tensor:
        """Return a meta tensor of the shape that the logits report."""
        shape = (*self.local.shape[:-1], self.logits.vocabulary.size)
        return torch.empty(shape, dtype=self.local.dtype, device="meta")

    def wrap(self, local: Tensor) -> VocabularyParallelLogits:
        """Return local columns as logits with the same vocabulary."""
        logits = self.logits
        return logits.wrap(local, vocabulary=logits.vocabulary, group=logits.group)

    def on(self, first: Tensor) -> Any:
        """Call the function with another first argument."""
        return self.function(first, *self.others, **self.options)

    def over_vocabulary(self) -> bool | None:
        """Return ``keepdim`` of a reduction over the last dimension only, otherwise None."""
        names = {"dim": None, "keepdim": False, **self.options}
        dim, keepdim = (*self.others, *list(names.values())[len(self.others) :])[:2]
        dims = self.logits.dim()
        return bool(keepdim) if isinstance(dim, int) and dim % dims == dims - 1 else None


# Handlers: call -> result, or NotImplemented to gather.


def _on_local(call: _LogitsCall) -> object:
    """Call a function whose result is the same for the local part and the full logits."""
    return call.on(call.local)


def _wrapped(call: _LogitsCall) -> object:
    return call.wrap(call.on(call.local))


def _arithmetic(call: _LogitsCall) -> object:
    """Compute with numbers, or with logits of the same columns (an adapter of the head)."""
    if call.options or not all(
        isinstance(arg, int | float) or _has_columns_of(call.logits, arg) for arg in call.others
    ):
        return NotImplemented
    operands = (
        _local(arg) if isinstance(arg, VocabularyParallelLogits) else arg for arg in call.others
    )
    return call.wrap(call.function(call.local, *operands))


def _has_columns_of(logits: VocabularyParallelLogits, operand: object) -> bool:
    return (
        isinstance(operand, VocabularyParallelLogits)
        and operand.vocabulary == logits.vocabulary
        and operand.shape == logits.shape
    )


def _to(call: _LogitsCall) -> object:
    if any(isinstance(arg, VocabularyParallelLogits) for arg in call.others):
        return NotImplemented
    moved = call.on(call.local)
    return call.wrap(moved) if moved.device == call.local.device else NotImplemented


def _on_full(call: _LogitsCall) -> object:
    """Call a function that uses only the shape."""
    return call.on(call.full)


def _view(call: _LogitsCall) -> object:
    """Reshape all dimensions except the last one, which must remain the vocabulary."""
    local = call.local
    full = call.on(call.full)
    size = call.logits.vocabulary.size
    if full.dtype is not local.dtype or not full.dim() or full.size(-1) != size:
        return NotImplemented
    sizes = (*full.shape[:-1], local.size(-1))
    return call.wrap(local.view(sizes) if call.name == "view" else local.reshape(sizes))


def _getitem(call: _LogitsCall) -> object:
    index = call.others[0] if isinstance(call.others[0], tuple) else (call.others[0],)
    return _wrapped(call) if keeps_vocabulary(index, call.logits.dim()) else NotImplemented


def keeps_vocabulary(index: tuple, dims: int) -> bool:
    """Return True if indexing keeps the last dimension complete and last.

    After the ellipsis is expanded, the last item must be ``:``.
    """
    consumed = 0
    ellipses = 0
    for item in index:
        if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
            if item.dim() == 0:
                return False
            consumed += item.dim()
        elif isinstance(item, Tensor | slice) or (
            isinstance(item, int) and not isinstance(item, bool)
        ):
            consumed += 1
        elif item is Ellipsis:
            ellipses += 1
        elif item is not None:
            # Lists, arrays and Python booleans are rare on logits; gather for all of them.
            return False
    if consumed < dims and (not ellipses or index[-1] is Ellipsis):
        return ellipses <= 1
    last = index[-1] if index[-1] is not Ellipsis else index[-2]
    return ellipses <= 1 and isinstance(last, slice) and last == slice(None)


def _cross_entropy(call: _LogitsCall) -> object:
    """Compute the loss from split logits.

    Unsupported cases (class weights, class probabilities, (N, C, d)) gather the logits.
    """
    logits = call.logits
    bound = _LOSS.bind(logits, *call.others, **call.options)
    bound.apply_defaults()
    args = bound.arguments
    target = args["target"]
    reduction = args["reduction"]
    smoothing = args["label_smoothing"]
    plain = all(args[name] is None for name in ("weight", "size_average", "reduce"))
    valid = reduction in get_args(Reduction) and 0.0 <= smoothing <= 1.0
    indices = isinstance(target, Tensor) and not target.is_floating_point()
    # torch expects the classes in dimension 1, which is the last one only up to two dimensions.
    fits = indices and logits.dim() <= 2 and target.shape == call.local.shape[:-1]
    if not (plain and valid and fits):
        return NotImplemented
    return vocabulary_parallel_cross_entropy(
        call.local,
        target,
        vocabulary=logits.vocabulary,
        group=logits.group,
        ignore_index=args["ignore_index"],
        label_smoothing=smoothing,
        reduction=reduction,
    )


def _argmax(call: _LogitsCall) -> object:
    """Return the best of all ranks' maxima; among equal logits, the smallest id."""
    keepdim = call.over_vocabulary()
    words = call.logits.vocabulary
    group = call.logits.group
    if keepdim is None:
        return NotImplemented
    local = call.local.detach()[..., : words.count]
    if words.count:
        value, column = local.max(-1)
        column = column + words.start
    else:
        value = local.new_full(local.shape[:-1], -torch.inf)
        column = local.new_zeros(local.shape[:-1], dtype=torch.int64)
    values = start_all_gather(value.unsqueeze(0), dim=0, group=group)
    columns = start_all_gather(column.unsqueeze(0), dim=0, group=group)
    best = columns.wait().gather(0, values.wait().argmax(0, keepdim=True)).squeeze(0)
    return best.unsqueeze(-1) if keepdim else best


def _logsumexp(call: _LogitsCall) -> object:
    keepdim = call.over_vocabulary()
    logits = call.logits
    if keepdim is None:
        return NotImplemented
    result = LogSumExp.apply(call.local, logits.vocabulary, logits.group)
    return result.unsqueeze(-1) if keepdim else result


def _text(call: _LogitsCall) -> str:
    """Describe the logits without values: printing on one rank must not communicate."""
    logits = call.logits
    return (
        f"VocabularyParallelLogits(shape={tuple(logits.shape)}, dtype={logits.dtype}, "
        f"device='{logits.device}', "
        f"tensor_parallel_rank={logits.group.rank} of {logits.group.size})"
    )


def _refuse_hook(call: _LogitsCall) -> object:
    raise ValueError(
        f"{call.name} would see only this rank's part of logits that are split along the "
        "vocabulary. First gather them: logits = lightning_ptdp.tensor_parallel.gather_full(logits)"
    )


def _refuse_in_place(call: TorchCall) -> None:
    changes = call.changes_first or call.name == "__set__"
    if (changes and isinstance(call.first, VocabularyParallelLogits)) or isinstance(
        call.options.get("out"), VocabularyParallelLogits
    ):
        raise ValueError(
            f"{call.name} changes logits in place that are split along the vocabulary. Use the "
            "variant that returns a new tensor, or first gather them: logits = "
            "lightning_ptdp.tensor_parallel.gather_full(logits)"
        )


_LOCAL = (
    "device dtype element_size get_device grad_fn is_complex is_cpu is_cuda is_floating_point "
    "is_inference is_leaf is_meta layout dim ndim requires_grad"
)
_LOSS = inspect.signature(F.cross_entropy)
_SHAPE = "shape size numel nelement __len__"
_KEEP = "bfloat16 clone contiguous detach double float half neg tanh"
_NUMBER = "__radd__ __rmul__ __rsub__ __truediv__ add div mul multiply sub subtract true_divide"

_HANDLERS: Mapping[str, Callable[[_LogitsCall], object]] = MappingProxyType(
    {
        **dict.fromkeys(_LOCAL.split(), _on_local),
        **dict.fromkeys(_KEEP.split(), _wrapped),
        **dict.fromkeys(_NUMBER.split(), _arithmetic),
        **dict.fromkeys(("__repr__", "__format__", "__str__"), _text),
        **dict.fromkeys(
            ("register_hook", "register_post_accumulate_grad_hook", "retain_grad"), _refuse_hook
        ),
        **dict.fromkeys(_SHAPE.split(), _on_full),
        **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), _view),
        "to": _to,
        "__getitem__": _getitem,
        "cross_entropy": _cross_entropy,
        "argmax": _argmax,
        "logsumexp": _logsumexp,
    }
)
