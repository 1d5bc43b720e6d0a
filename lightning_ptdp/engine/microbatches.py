"""Splitting of a batch into microbatches along dimension 0, and their labels and outputs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from lightning_ptdp.base.nested import (
    Nested,
    children,
    iterate_tensors,
    map_tensors,
    named_tensors,
    rebuilt,
)
from lightning_ptdp.engine.image_batch import holds_images, split_images

_T = TypeVar("_T")


def microbatch_sizes(samples: int, count: int) -> tuple[int, ...]:
    """Split ``samples`` as evenly as possible into at most ``count`` microbatches.

    The larger microbatches come first.
    """
    count = min(samples, count)
    share, remainder = divmod(samples, count)
    return tuple(share + (i < remainder) for i in range(count))


def split_batch(
    batch: Nested, sizes: Sequence[int], *, image_token: int | None = None
) -> list[Nested]:
    """Return one batch per microbatch; tensors are views.

    Scalars and tensors of first dimension 1 are passed whole.

    Args:
        batch: The batch.
        sizes: Numbers of samples in the microbatches.
        image_token: Id of the tokens that stand for images in ``input_ids``; None: there are none.

    Raises:
        ValueError: The images cannot be assigned to the microbatches.
    """
    if len(sizes) == 1:
        return [batch]
    if image_token is not None and holds_images(batch):
        images = split_images(batch, sizes, image_token)
        rest = {name: value for name, value in batch.items() if name not in images[0]}
        parts = split_batch(rest, sizes)
        return [rebuilt(batch, {**part, **own}) for part, own in zip(parts, images, strict=True)]
    total, ends = sum(sizes), [0, *accumulate(sizes)]

    def cut(window: slice, tensor: Tensor) -> Tensor:
        return tensor[window] if tensor.dim() and tensor.size(0) == total else tensor

    def cut_list(window: slice, items: Sequence[_T]) -> Sequence[_T]:
        return items[window] if len(items) == total else items

    windows = [slice(*ends) for ends in pairwise(ends)]
    return [map_tensors(batch, partial(cut, w), partial(cut_list, w)) for w in windows]


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


# ---- Counts of the labels in a batch that are not ignored ----------------------------------------
#
# They give the expected number of tokens, and show if equally weighted parts of a batch have
# different numbers of labels.


_IGNORED = -100
_PARTS = 1_000_000


def expected_tokens(batch: Nested, samples: int) -> int:
    """Return the expected number of tokens in a batch of this form.

    It is the number of elements of the batch's largest tensor of integers.
    """
    sizes = [
        tensor.numel()
        for _, tensor in named_tensors(batch)
        if not tensor.is_floating_point() and tensor.dim() <= 2
    ]
    return max([samples, *sizes])


def power_above(number: float) -> float:
    """Return the least power of two that is not below ``number``; division by it is exact."""
    return 2.0 ** math.ceil(math.log2(max(number, 1)))


def label_spread(batch: Nested, sizes: Sequence[int], *, device: torch.device) -> Tensor:
    """Return the most labels per sample in a microbatch, and the negative of the least.

    Ignored labels do not count. The values are in millionths, (2) int64 on ``device``.

    Args:
        batch: The whole batch.
        sizes: Numbers of samples in its microbatches.
        device: Device of the result.
    """
    labels = _labels(batch, sum(sizes)) if sizes else None
    if labels is None:
        return torch.zeros(2, dtype=torch.int64, device=device)
    counts = (
        (labels[1] != _IGNORED).flatten(1).sum(1)
        if labels[1].dim() > 1
        else (labels[1] != _IGNORED).long()
    )
    if len(set(sizes)) == 1:
        shares = counts.view(len(sizes), -1).sum(1) * _PARTS // sizes[0]
    else:
        shares = torch.stack(
            [part.sum() * _PARTS // len(part) for part in counts.split(list(sizes))]
        )
    return torch.stack([shares.amax(), -shares.amin()]).to(device, non_blocking=True)


def is_uneven(most: float, negative_least: float) -> bool:
    """Return True if ``label_spread``, or its maximum over ranks, shows unequal numbers."""
    return most + negative_least > 1  # tolerates rounding


def describe_uneven(batch: Nested, samples: int) -> str:
    """Return the warning about the labels of ``batch``."""
    name = (_labels(batch, samples) or ("", None))[0]
    label_name = f"'{name}'" if name else "the labels"
    return (
        "the microbatches or replicas of a batch have different numbers of labels other than "
        f"{_IGNORED} in {label_name}, and training_step returns no 'num_tokens'. The mean of each "
        "microbatch has the same weight, so the loss is not the mean over all labels as in "
        f"one process. Return {{'loss': loss, 'num_tokens': (labels != {_IGNORED}).sum()}} "
        "from training_step"
    )


def _labels(batch: Nested, samples: int) -> tuple[str, Tensor] | None:
    """Return the tensor that seems to hold labels: by its name, else the last one of integers."""
    tensors = [
        (name, tensor)
        for name, tensor in named_tensors(batch)
        if tensor.dtype in (torch.int64, torch.int32)
        and tensor.dim()
        and tensor.size(0) == samples
        and tensor.numel()
    ]
    labels = [pair for pair in tensors if "label" in pair[0].lower() or "target" in pair[0].lower()]
    return next(iter(labels), tensors[-1] if tensors else None)
