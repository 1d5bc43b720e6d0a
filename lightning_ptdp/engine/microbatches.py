"""Splitting of a batch into microbatches along dimension 0, and merging of the outputs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from lightning_ptdp.base.nested import Nested, children, iterate_tensors, map_tensors, rebuilt

__all__ = ["merge_outputs", "microbatch_sizes", "signature", "split_batch"]

_T = TypeVar("_T")


def microbatch_sizes(samples: int, count: int) -> tuple[int, ...]:
    """Split ``samples`` as evenly as possible into at most ``count`` microbatches.

    The larger microbatches come first.
    """
    count = min(samples, count)
    share, rest = divmod(samples, count)
    return tuple(share + (i < rest) for i in range(count))


def split_batch(batch: Nested, sizes: Sequence[int]) -> list[Nested]:
    """Return one batch per microbatch; tensors are views.

    Scalars and tensors of first dimension 1 are passed whole.
    """
    total, ends = sum(sizes), [0, *accumulate(sizes)]

    def cut(window: slice, tensor: Tensor) -> Tensor:
        return tensor[window] if tensor.dim() and tensor.size(0) == total else tensor

    def cut_list(window: slice, items: Sequence[_T]) -> Sequence[_T]:
        return items[window] if len(items) == total else items

    windows = [slice(*ends) for ends in pairwise(ends)]
    return (
        [map_tensors(batch, partial(cut, w), partial(cut_list, w)) for w in windows]
        if len(sizes) > 1
        else [batch]
    )


def signature(batch: Nested) -> Hashable:
    """Return the shapes and dtypes of the tensors of a (micro)batch."""
    return tuple((tuple(t.shape), t.dtype) for t in iterate_tensors(batch))


def merge_outputs(
    outputs: Sequence[Nested], sizes: Sequence[int], weights: Sequence[float]
) -> Nested:
    """Merge the outputs of the microbatches into one output.

    Tensors with the samples along dimension 0 are concatenated, scalars are averaged with
    ``weights``, and lists of samples are joined. A value of any other kind must be equal in all
    microbatches; otherwise the list of all values is returned.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        if first.dim() and all(o.size(0) == n for o, n in zip(outputs, sizes, strict=True)):
            return torch.cat(list(outputs))
        if first.dim() == 0:
            return _weighted_mean(outputs, weights)
        return list(outputs)
    lengths = [len(output) for output in outputs] if isinstance(first, (list, tuple)) else []
    if lengths == [*sizes] and not any(isinstance(v, Tensor) for v in first):
        return type(first)(v for o in outputs for v in o)
    if isinstance(first, Mapping) or len(set(lengths)) == 1:
        parts = [dict(children(output) or ()) for output in outputs]
        merged = {
            key: merge_outputs([part[key] for part in parts], sizes, weights) for key in parts[0]
        }
        return rebuilt(first, merged)
    if isinstance(first, float):
        return float(
            _weighted_mean([torch.tensor(o, dtype=torch.float64) for o in outputs], weights)
        )
    return first if all(o == first for o in outputs) else list(outputs)


def _weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = sum(weights)
    dtype = values[0].dtype if values[0].is_floating_point() else torch.float32
    stacked = torch.stack([v.detach().to(torch.float64) for v in values])
    scale = torch.tensor(
        [w / total if total else 1 / len(values) for w in weights], dtype=torch.float64
    )
    scale = scale.to(stacked.device, non_blocking=True)
    # A microbatch without a counted token has no weight, regardless of its value (its mean may be
    # 0/0).
    return torch.where(scale > 0, stacked * scale, torch.zeros_like(stacked)).sum().to(dtype)
