"""Names of tensors in transformers' files where they differ from the model's: some are renamed, and
experts that are computed together are stored apart."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ptdp.checkpoint.rectangles import Rectangle
from lightning_ptdp.shims.transformers import as_in_files

__all__ = ["View", "views_in_files"]


@dataclass(frozen=True, kw_only=True)
class View:
    """A tensor of a file as a part of one of the model's.

    Attributes:
        name: The model's.
        place: Where it lies in that.
        dims: For each dimension of the file's, which of the model's it is; the others are of extent
            1.
    """

    name: str
    place: Rectangle
    dims: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> View:
        """All of a tensor."""
        return cls(
            name=name, place=Rectangle.at((0,) * len(shape), shape), dims=tuple(range(len(shape)))
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the file's tensor."""
        return tuple(self.place.shape[dim] for dim in self.dims)

    def in_file(self, place: Rectangle) -> Rectangle:
        """Return the position in the file's tensor of the rectangle ``place`` of the model's."""
        begin, end = (
            tuple(ends[dim] for dim in self.dims) for ends in place.seen_from(self.place.begin)
        )
        return Rectangle(begin, end)

    def turned(self, values: torch.Tensor) -> torch.Tensor:
        """A view of values of the model's tensor as they lie in the file's."""
        others = [dim for dim in range(values.dim()) if dim not in self.dims]
        return values.permute(*others, *self.dims)[(0,) * len(others)]


def views_in_files(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, View]:
    """Return the tensors that ``save_pretrained`` would write, by their names in the files, each as
    a part of one of the model's.

    Tensors that are no such parts stay as in the model, which ``from_pretrained`` reads as well.

    Args:
        model: Of transformers, on the meta device.
        shapes: Of its tensors, of tied ones once.
    """
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    own = {name if tied.get(name, name) in shapes else tied[name]: name for name in shapes}
    names, begins, end = [*own.values()], list[int](), 0
    for name in names:
        begins.append(end)
        end += max(math.prod(shapes[name]), 1)
    flat = torch.empty(
        end, device="meta"
    )  # all of them in one: where a view of it begins says of which it is a part
    wholes = {
        stored: flat[begin : begin + math.prod(shapes[name])].view(shapes[name])
        for (stored, name), begin in zip(own.items(), begins, strict=True)
    }
    found: dict[str, View] = {}
    for stored, value in as_in_files(model, wholes).items():
        if value.untyped_storage().nbytes() != flat.untyped_storage().nbytes():
            found.clear()
            break
        first = int(value.storage_offset())
        number = bisect_right(begins, first) - 1
        view = _view(names[number], shapes[names[number]], first - begins[number], value)
        if view is None:
            found.clear()
            break
        found[stored] = view
    return found or {stored: View.whole(name, shapes[name]) for stored, name in own.items()}


def _view(name: str, shape: tuple[int, ...], first: int, value: torch.Tensor) -> View | None:
    """Return ``value`` as a view of a tensor of ``shape`` that lies row by row and begins ``first``
    elements before it; None if it is no rectangle."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    begin = (
        tuple(first // stride % extent for stride, extent in zip(strides, shape, strict=True))
        if 0 not in shape
        else (0,) * len(shape)
    )
    dims: list[int] = []
    for extent, stride in zip(value.shape, value.stride(), strict=True):
        free = [dim for dim in range(len(shape)) if dim not in dims]
        fitting = [
            dim
            for dim in free
            if (shape[dim] == 1 if extent == 1 else strides[dim] == stride and shape[dim] > 1)
        ]
        if not fitting:
            return None
        dims.append(fitting[0])
    extents = [1] * len(shape)
    for dim, extent in zip(dims, value.shape, strict=True):
        extents[dim] = extent
    return View(name=name, place=Rectangle.at(begin, extents), dims=tuple(dims))
