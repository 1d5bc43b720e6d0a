"""Correspondence of the tensors in a Hugging Face folder with those of a model.

transformers renames some tensors, and stores experts separately that its models compute together.
The native models fuse matrices. Each tensor of a file is a rectangle of a model's tensor.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.parameters.placement import Shape
from lightning_ptdp.parameters.rectangle import Rectangle
from lightning_ptdp.shims.transformers import as_in_files


@dataclass(frozen=True, kw_only=True)
class View:
    """A tensor of a file, as a part of a tensor of the model.

    Attributes:
        name: Name of the model's tensor.
        place: Rectangle of the part in the model's tensor.
        dims: For each dimension of the file's tensor, the corresponding dimension of the model's.
            The model's remaining dimensions have an extent of 1 in the part.
    """

    name: str
    place: Rectangle
    dims: Shape

    @classmethod
    def full(cls, name: str, shape: Shape) -> View:
        """Return the view of a full tensor."""
        return cls(
            name=name, place=Rectangle.at((0,) * len(shape), shape), dims=tuple(range(len(shape)))
        )

    @property
    def shape(self) -> Shape:
        """Return the shape of the file's tensor."""
        return tuple(self.place.shape[dim] for dim in self.dims)

    def in_file(self, place: Rectangle) -> Rectangle:
        """Return the position in the file's tensor of the rectangle ``place`` of the model's."""
        begin, end = (
            tuple(ends[dim] for dim in self.dims) for ends in place.seen_from(self.place.begin)
        )
        return Rectangle(begin, end)

    def turned(self, values: Tensor) -> Tensor:
        """Return a view of ``values`` of the model's tensor in the file's order of dimensions."""
        unit_dims = [dim for dim in range(values.dim()) if dim not in self.dims]
        return values.permute(*unit_dims, *self.dims)[(0,) * len(unit_dims)]


def views_in_files(model: Any, shapes: Mapping[str, Shape]) -> dict[str, View]:
    """Return the tensors that ``save_pretrained`` writes, as parts of the model's tensors.

    The result is keyed by the names in the files. If one tensor is not a rectangle of a model's
    tensor, all tensors keep their names and shapes in the model, which ``from_pretrained`` reads as
    well.

    Args:
        model: A model of transformers, on the meta device.
        shapes: Shapes of its tensors by name. Tied tensors occur once.
    """
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    model_names = {name if tied.get(name, name) in shapes else tied[name]: name for name in shapes}
    names = [*model_names.values()]
    begins = list[int]()
    end = 0
    for name in names:
        begins.append(end)
        end += max(math.prod(shapes[name]), 1)
    # All tensors are views of one flat tensor, so that the storage offset of a view identifies the
    # tensor that it is a part of.
    flat = torch.empty(end, device="meta")
    tensors = {
        stored: flat[begin : begin + math.prod(shapes[name])].view(shapes[name])
        for (stored, name), begin in zip(model_names.items(), begins, strict=True)
    }
    views: dict[str, View] = {}
    for stored, value in as_in_files(model, tensors).items():
        first = int(value.storage_offset())
        index = bisect_right(begins, first) - 1
        view = _view(names[index], shapes[names[index]], first - begins[index], value)
        is_copy = value.untyped_storage().nbytes() != flat.untyped_storage().nbytes()
        if view is None or is_copy:
            return {name: View.full(own, shapes[own]) for name, own in model_names.items()}
        views[stored] = view
    return views


def _view(name: str, shape: Shape, first: int, value: Tensor) -> View | None:
    """Return the view of a contiguous tensor that ``value`` is, or None if not a rectangle.

    Args:
        name: Name of the contiguous tensor.
        shape: Shape of the contiguous tensor.
        first: Number of elements by which ``value`` begins after the contiguous tensor.
        value: The view.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    begin = (
        tuple(first // stride % extent for stride, extent in zip(strides, shape, strict=True))
        if 0 not in shape
        else (0,) * len(shape)
    )
    dims: list[int] = []
    for extent, stride in zip(value.shape, value.stride(), strict=True):
        free = [dim for dim in range(len(shape)) if dim not in dims]
        matches = [
            dim
            for dim in free
            if (shape[dim] == 1 if extent == 1 else strides[dim] == stride and shape[dim] > 1)
        ]
        if not matches:
            return None
        dims.append(matches[0])
    extents = [1] * len(shape)
    for dim, extent in zip(dims, value.shape, strict=True):
        extents[dim] = extent
    return View(name=name, place=Rectangle.at(begin, extents), dims=tuple(dims))
