"""Weights of a module with peft's adapters merged in.

Each rank adds its part of the product B A to its part of the weight, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.checkpoint import CheckpointError, LocalRectangle, rectangles_of
from lightning_ptdp.parameters.placement import Piece, Placement, Shape
from lightning_ptdp.shims.peft import adapters_of, copies_of, plain_name, replaced_by

_BASE = "base_layer.weight"


def merged_rectangles(
    module: nn.Module, tensors: Mapping[str, tuple[Tensor, Placement]]
) -> list[LocalRectangle]:
    """Return this rank's rectangles of a module, with peft's adapters merged in.

    Args:
        module: This rank's part of the module.
        tensors: Its local tensors, by name.

    Raises:
        CheckpointError: An adapter is more than a product of two matrices.
    """
    wrappers = {
        f"{name}.": child
        for name, child in module.named_modules()
        if replaced_by(child) is not None
    }
    rectangles: list[LocalRectangle] = []
    for name, (tensor, placement) in tensors.items():
        wrapper = max((outer for outer in wrappers if name.startswith(outer)), key=len, default="")
        inner_name = name.removeprefix(wrapper)
        if wrapper and not _stays(wrappers[wrapper], inner_name):
            continue
        parts = rectangles_of({plain_name(name): (tensor, placement)})
        if wrapper and inner_name == _BASE and adapters_of(wrappers[wrapper]):
            pairs = [*_pairs(wrappers[wrapper], wrapper.removesuffix("."))]
            pieces = [
                piece for piece in placement.pieces if piece.full in {part.offset for part in parts}
            ]
            assert len(pieces) == len(parts), name
            parts = [
                replace(part, read=partial(_sum, tensor, piece, pairs))
                for part, piece in zip(parts, pieces, strict=True)
            ]
        rectangles += parts
    return rectangles


def _stays(wrapper: nn.Module, name: str) -> bool:
    """Return True if a tensor inside peft's wrapper belongs to the merged module.

    A trained copy of a module replaces the original.
    """
    inner = next(copies_of(wrapper), replaced_by(wrapper))
    return name.startswith(f"{inner}.")


def _pairs(layer: Any, name: str) -> Iterator[tuple[Tensor, Tensor, float, bool]]:
    """Yield B, A, scale and ``fan_in_fan_out`` of each adapter of a layer.

    ``fan_in_fan_out`` is True if the weight is stored as (in, out).
    """
    for adapter in adapters_of(layer) or ():
        if adapter not in layer.lora_A or adapter in getattr(layer, "lora_magnitude_vector", {}):
            raise CheckpointError(
                f"the adapter of {name!r} is not a simple product of two matrices. Save a "
                "checkpoint, and merge it with ptdp convert"
            )
        yield (
            layer.lora_B[adapter].weight,
            layer.lora_A[adapter].weight,
            layer.scaling[adapter],
            layer.fan_in_fan_out,
        )


@torch.no_grad()
def _sum(
    weight: Tensor,
    piece: Piece,
    pairs: list[tuple[Tensor, Tensor, float, bool]],
    offset: Shape,
    shape: Shape,
) -> Tensor:
    """Return a rectangle of the full weight with the adapters added.

    Args:
        weight: The local weight.
        piece: The piece of the weight that contains the rectangle.
        pairs: B, A, scale and ``fan_in_fan_out`` of each adapter.
        offset: Offset of the rectangle in the full weight.
        shape: Shape of the rectangle.
    """
    begins = [
        local + place - full
        for local, place, full in zip(piece.local, offset, piece.full, strict=True)
    ]
    rows, columns = (
        slice(begin, begin + extent) for begin, extent in zip(begins, shape, strict=True)
    )
    value = weight.detach()[rows, columns]
    for up, down, scale, transposed in pairs:
        product = (up[columns] @ down[:, rows]).T if transposed else up[rows] @ down[:, columns]
        value = (value + product * scale).to(weight.dtype)
    return value
