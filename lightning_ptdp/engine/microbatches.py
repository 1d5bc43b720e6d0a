"""Splitting of a batch into microbatches along dimension 0, and merging of their outputs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_ptdp.base.nested import (
    IMAGE_FIELDS,
    Nested,
    children,
    has_batch_size,
    images_by_sample,
    iterate_tensors,
    rebuilt,
)


def microbatch_sizes(samples: int, count: int) -> tuple[int, ...]:
    """Split ``samples`` as evenly as possible into at most ``count`` microbatches.

    The larger microbatches come first.

    Raises:
        ValueError: There are no samples.
    """
    if not samples:
        raise ValueError(
            "the batch has 0 samples, which cannot be split into microbatches. Leave empty batches "
            "out in the sampler or the collate function"
        )
    count = min(samples, count)
    share, remainder = divmod(samples, count)
    return tuple(share + (i < remainder) for i in range(count))


def split_batch(
    batch: Nested, sizes: Sequence[int], *, image_token: int | None = None
) -> list[Nested]:
    """Return one batch per microbatch; tensors are views.

    Arrays are split like tensors, and so are lists with one item per sample. Scalars, and tensors
    of first dimension 1, are passed whole.

    Args:
        batch: The batch.
        sizes: Numbers of samples in the microbatches.
        image_token: Id of the tokens that stand for images in ``input_ids``; None: there are none.

    Raises:
        ValueError: The images cannot be assigned to the microbatches.
    """
    if len(sizes) == 1:
        return [batch]
    if image_token is not None and _holds_images(batch):
        images = _split_images(batch, sizes, image_token)
        rest = {name: value for name, value in batch.items() if name not in images[0]}
        parts = split_batch(rest, sizes)
        return [rebuilt(batch, {**part, **own}) for part, own in zip(parts, images, strict=True)]
    ends = [0, *accumulate(sizes)]
    return [_part(batch, slice(start, end), sum(sizes)) for start, end in pairwise(ends)]


def _part(value: Nested, window: slice, samples: int) -> Nested:
    """Return the samples in ``window`` of a batch of ``samples``."""
    items = children(value)
    has_rows = _rows(value) == samples
    if items is None or (has_rows and has_batch_size(value)):
        return value[window] if has_rows else value
    if (
        _is_list(value)
        and len(value) == samples
        and not any(_has_samples(item, samples) for item in value)
    ):
        return value[window]
    return rebuilt(value, {key: _part(item, window, samples) for key, item in items})


def _is_list(value: Nested) -> bool:
    """Return True for a list or tuple whose items have no names."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def _has_samples(value: Nested, samples: int) -> bool:
    """Return True if an item of a list is itself a field, or has fields, of all samples.

    A list that is as long as the batch is a field if its items have one type. ``default_collate``
    makes such lists.
    """
    if isinstance(value, Mapping):
        return any(_has_samples(item, samples) for item in value.values())
    if not isinstance(value, (list, tuple)):
        return _rows(value) == samples
    is_field = len(value) == samples and len({type(item) for item in value}) == 1
    return is_field or any(_has_samples(item, samples) for item in value)


def _rows(value: Nested) -> int:
    """Return the first dimension of a tensor or an array, else -1."""
    return next(iter(getattr(value, "shape", ())), -1)


def signature(batch: Nested) -> Hashable:
    """Return the shapes and dtypes of the tensors of a (micro)batch."""
    return tuple((tuple(t.shape), t.dtype) for t in iterate_tensors(batch))


def merge_outputs(
    outputs: Sequence[Nested], sizes: Sequence[int], weights: Sequence[float]
) -> Nested:
    """Merge the outputs of the microbatches into one output.

    Tensors and arrays with the samples along dimension 0 are concatenated, scalars are averaged
    with ``weights``, and lists of samples are joined. A list of scalars is averaged item by item. A
    value of any other kind must be equal in all microbatches; otherwise the list of all values is
    returned, with None for a key that a microbatch lacks.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    numbers = [o for o in outputs if isinstance(o, int | float | np.number)]
    if len(numbers) == len(outputs) and any(isinstance(o, float | np.floating) for o in numbers):
        return float(
            _weighted_mean([torch.tensor(o, dtype=torch.float64) for o in numbers], weights)
        )
    if len({*map(type, outputs)}) > 1:
        return list(outputs)
    if isinstance(first, Tensor) or (has_batch_size(first) and first.batch_size):
        if first.dim() and all(o.size(0) == n for o, n in zip(outputs, sizes, strict=True)):
            return torch.cat(list(outputs))
        if first.dim() == 0:
            return _weighted_mean(outputs, weights)
        return list(outputs)
    lengths = [len(output) for output in outputs] if _is_list(first) else []
    if lengths == [*sizes] and _holds_samples(outputs, sizes):
        return type(first)(v for o in outputs for v in o)
    if children(first) is not None and len(set(lengths)) <= 1:
        parts = [dict(children(output) or ()) for output in outputs]
        keys = dict.fromkeys(key for part in parts for key in part)
        merged = {
            key: merge_outputs([part.get(key) for part in parts], sizes, weights) for key in keys
        }
        return rebuilt(first, merged)
    if isinstance(first, np.ndarray):
        if first.ndim and all(len(o) == n for o, n in zip(outputs, sizes, strict=True)):
            return np.concatenate(outputs)
        return first if all(np.array_equal(o, first) for o in outputs) else list(outputs)
    return first if all(o == first for o in outputs) else list(outputs)


def _holds_samples(outputs: Sequence[Sequence[Nested]], sizes: Sequence[int]) -> bool:
    """Return True if lists as long as the microbatches hold samples, not fields or scalars."""
    tensors = [
        (v, n) for o, n in zip(outputs, sizes, strict=True) for v in o if isinstance(v, Tensor)
    ]
    return not tensors or any(v.dim() and v.size(0) != n for v, n in tensors)


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


# ---- Images of a vision-language batch -----------------------------------------------------------
#
# A processor of transformers concatenates the images of all samples, so that dimension 0 of
# ``pixel_values`` counts images, or patches of images (Qwen2.5-VL). The placeholder tokens in
# ``input_ids`` tell how many of them belong to each sample. Only images that are padded to the same
# number in every sample (Idefics3) have the samples along dimension 0.


def _holds_images(batch: Nested) -> bool:
    """Return True for a vision-language batch with images."""
    return isinstance(batch, Mapping) and all(
        isinstance(batch.get(name), Tensor) for name in ("pixel_values", "input_ids")
    )


def _split_images(
    batch: Mapping[str, Any], sizes: Sequence[int], image_token: int
) -> list[dict[str, Tensor | None]]:
    """Return the image tensors of each microbatch; None in a microbatch without images.

    Reads the counts back from the device. A step in microbatches has already waited for it at the
    end of the previous step.

    Args:
        batch: A batch with images.
        sizes: Numbers of samples in the microbatches.
        image_token: Id of the placeholder tokens.

    Raises:
        ValueError: The images cannot be assigned to the microbatches.
    """
    tokens = (batch["input_ids"] == image_token).sum(1).tolist()
    samples = [0, *accumulate(sizes)]
    pixels = images = samples
    if not images_by_sample(batch):
        pixels, images = _ends(batch, [sum(tokens[:end]) for end in samples])
    ends = {
        name: pixels if name == "pixel_values" else images
        for name in IMAGE_FIELDS
        if isinstance(batch.get(name), Tensor)
    }
    return [
        {
            name: batch[name][rows[index] : rows[index + 1]] if any(tokens[start:stop]) else None
            for name, rows in ends.items()
        }
        for index, (start, stop) in enumerate(pairwise(samples))
    ]


def _ends(batch: Mapping[str, Any], tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the rows of ``pixel_values`` and the images before each microbatch, and in total.

    The number of rows is proportional to that of tokens, and an image has a whole number of rows.

    Args:
        batch: The batch.
        tokens: Image tokens before each microbatch, and in total.
    """
    rows = batch["pixel_values"].size(0)
    grid = batch.get("image_grid_thw")
    rows_of_images = [1] * rows if grid is None else grid.prod(1).tolist()
    images_before = {end: index for index, end in enumerate([0, *accumulate(rows_of_images)])}
    ends = [count * rows / max(tokens[-1], 1) for count in tokens]
    if ends[-1] != sum(rows_of_images) or any(end not in images_before for end in ends):
        raise ValueError(
            f"pixel_values has {rows} rows for {tokens[-1]} image tokens, which cannot be "
            f"split into {len(tokens) - 1} microbatches, because the images of a sample are "
            "not known. Use num_microbatches=1"
        )
    return [int(end) for end in ends], [images_before[end] for end in ends]
