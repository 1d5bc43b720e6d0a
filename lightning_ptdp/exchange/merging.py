"""Weights of a module with peft's adapters merged in.

Each rank adds its part of the product B A to its part of the weight, a few rows at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.checkpoint import CheckpointError, LocalRectangle, rectangles_of
from lightning_ptdp.parameters.placement import Piece, Placement, Shape
from lightning_ptdp.shims.peft import adapters_of, copies_of, plain_name, replaced_by

_BASE = "base_layer.weight"
_FACTOR = re.compile(r"lora_[AB]\.[^.]+\.weight")
_MATRIX = 2  # dimensions
_WHOLE_MODULES = ("original_module.", "modules_to_save.")


def merged_rectangles(
    module: nn.Module, tensors: Mapping[str, tuple[Tensor, Placement]]
) -> list[LocalRectangle]:
    """Return this rank's rectangles of a module, with peft's active adapters merged in.

    Args:
        module: This rank's part of the module.
        tensors: Its local tensors, by name.

    Raises:
        CheckpointError: An adapter is not a product of two matrices that is added to a weight.
    """
    wrappers = {
        f"{name}.": child
        for name, child in module.named_modules()
        if replaced_by(child) is not None
    }
    parts_of = {name: _split(name, wrappers) for name in tensors}
    for wrapper, inner_name in parts_of.values():
        if wrapper and not _is_merged(inner_name, wrapper, wrappers, tensors):
            raise CheckpointError(
                f"the adapter of {wrapper.removesuffix('.')!r} is not a simple product of two "
                "matrices that is added to an untied weight. Save a checkpoint, and merge its "
                "weights with peft (merge_and_unload), or with ptdp convert --merge"
            )
    rectangles: list[LocalRectangle] = []
    for name, (tensor, placement) in tensors.items():
        wrapper, inner_name = parts_of[name]
        if wrapper and not _stays(inner_name, wrappers[wrapper]):
            continue
        parts = rectangles_of({plain_name(name): (tensor, placement)})
        pairs = [*_pairs(wrappers[wrapper])] if wrapper and inner_name == _BASE else []
        if pairs:
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


def _split(name: str, wrappers: Iterable[str]) -> tuple[str, str]:
    """Return the prefix of the innermost wrapper that holds a tensor, and the rest of its name."""
    wrapper = max((outer for outer in wrappers if name.startswith(outer)), key=len, default="")
    return wrapper, name.removeprefix(wrapper)


def _stays(name: str, wrapper: Any) -> bool:
    """Return True if a tensor inside peft's wrapper belongs to the merged module.

    The active one of the trained copies of a module replaces the original.
    """
    active = {f"modules_to_save.{adapter}" for adapter in wrapper.active_adapters}
    copies = (copy for copy in copies_of(wrapper) if copy in active)
    return name.startswith(f"{next(copies, replaced_by(wrapper))}.")


def _is_merged(
    name: str,
    wrapper: str,
    wrappers: Mapping[str, Any],
    tensors: Mapping[str, tuple[Tensor, Placement]],
) -> bool:
    """Return True if the merged module needs nothing else of a tensor inside peft's wrapper.

    It stays, is part of another copy of a module, or is a factor that is added to a weight.
    """
    layer = wrappers[wrapper]
    if _stays(name, layer) or name.startswith(_WHOLE_MODULES):
        return True
    weight = tensors.get(f"{wrapper}{_BASE}")
    return (
        _FACTOR.fullmatch(name) is not None
        and adapters_of(layer) is not None
        and not {*layer.active_adapters} & layer.lora_variant.keys()
        and weight is not None
        and len(weight[1].full_shape) == _MATRIX
    )


def _pairs(layer: Any) -> Iterator[tuple[Tensor, Tensor, float, bool]]:
    """Yield B, A, scale and ``fan_in_fan_out`` of each active adapter of a layer.

    ``fan_in_fan_out`` is True if the weight is stored as (in, out).
    """
    for adapter in layer.active_adapters if adapters_of(layer) else ():
        if adapter in layer.lora_A:
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
