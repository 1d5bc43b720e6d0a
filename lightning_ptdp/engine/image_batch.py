"""Splitting of the images of a vision-language batch into microbatches.

A processor of transformers concatenates the images of all samples, so that dimension 0 of
``pixel_values`` counts images, or patches of images (Qwen2.5-VL). The placeholder tokens in
``input_ids`` tell how many of them belong to each sample. Only images that are padded to the same
number in every sample (Idefics3) have the samples along dimension 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from lightning_ptdp.base.nested import IMAGE_FIELDS, Nested, images_by_sample


def holds_images(batch: Nested) -> bool:
    """Return True for a vision-language batch with images."""
    return isinstance(batch, Mapping) and all(
        isinstance(batch.get(name), Tensor) for name in ("pixel_values", "input_ids")
    )


def split_images(
    batch: Mapping[str, Any], sizes: Sequence[int], image_token: int
) -> list[dict[str, Tensor | None]]:
    """Return the image tensors of each microbatch; None in a microbatch without images.

    Reads the counts back from the device. A step in microbatches has already waited for it at the
    end of the previous step.

    Args:
        batch: A batch that ``holds_images``.
        sizes: Numbers of samples in the microbatches.
        image_token: Id of the placeholder tokens.

    Raises:
        ValueError: The images cannot be assigned to the microbatches.
    """
    tokens = (batch["input_ids"] == image_token).sum(1).tolist()
    samples = [0, *accumulate(sizes)]
    pixels, images = samples, samples
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
    rows, grid = batch["pixel_values"].size(0), batch.get("image_grid_thw")
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
