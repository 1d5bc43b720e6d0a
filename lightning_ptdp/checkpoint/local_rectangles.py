"""Rectangles of the full tensors that a rank holds: the only form of placements in storage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.parameters.rectangle import Rectangle

__all__ = ["LocalRectangle", "Tensors", "cut_strips", "rectangles_of"]


Tensors = Mapping[str, tuple[torch.Tensor, Placement]]
_STRIPS = (8, 4, 2)
_STRIP_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LocalRectangle:
    """One rectangle of one full tensor, with its values.

    Attributes:
        name: Global name of the full tensor.
        full_shape: Shape of the full tensor.
        offset: Position in the full tensor at which the rectangle begins.
        values: A view of the local tensor with the rectangle's extent. Writing to it writes to the
            local tensor. To save values that are not in memory: a tensor on the meta device;
            ``read`` returns the values when they are written.
        read: Function from the offset and the shape of a part of the rectangle to its values.
    """

    name: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: torch.Tensor
    read: Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor] | None = None

    @classmethod
    def whole(cls, name: str, values: torch.Tensor) -> LocalRectangle:
        """Return the rectangle of a whole tensor."""
        return cls(
            name=name, full_shape=tuple(values.shape), offset=(0,) * values.dim(), values=values
        )

    @property
    def place(self) -> Rectangle:
        """Return the position in the full tensor."""
        return Rectangle.at(self.offset, self.values.shape)

    def within(self, place: Rectangle) -> LocalRectangle:
        """Return the part of the rectangle at ``place`` of the full tensor."""
        return replace(
            self, offset=place.begin, values=self.values[place.seen_from(self.offset).slices]
        )

    def to_write(self) -> torch.Tensor:
        """Return the values, on any device and with any strides."""
        return (
            self.values if self.read is None else self.read(self.offset, tuple(self.values.shape))
        )


def rectangles_of(tensors: Tensors) -> list[LocalRectangle]:
    """Return the rectangles of local tensors.

    Local elements that no rectangle of the placement covers (padding) are left out.

    Raises:
        CheckpointError: A tensor does not have the shape that its placement states.
    """
    found = []
    for name, (tensor, placement) in tensors.items():
        if tuple(tensor.shape) != placement.held_shape:
            raise CheckpointError(
                f"{name!r} has the local shape {tuple(tensor.shape)}, but its placement has "
                f"{placement.held_shape}"
            )
        for offset, values in placement.held(tensor.detach()):
            found.append(
                LocalRectangle(
                    name=name, full_shape=placement.full_shape, offset=offset, values=values
                )
            )
    return found


def cut_strips(rectangles: Iterable[LocalRectangle]) -> Iterator[LocalRectangle]:
    """Yield the rectangles, those of large matrices cut into strips along dimension 1.

    The cuts are at the eighths of the full tensor if an eighth has at least one MiB, else at the
    quarters or halves. They do not depend on the ranks that hold the tensor.

    A file stores a matrix row by row. Any rows can be read alone, but columns are small runs of
    every row. With strips, up to eight ranks that split a matrix by columns read only their own
    part. A matrix at least twice as tall as wide is not cut: vocabularies and widening layers have
    such a shape, and ranks split them by rows (arXiv 1909.08053, section 3). Strips cost the save a
    copy.
    """
    for whole in rectangles:
        rows, columns = whole.full_shape[:2] if len(whole.full_shape) > 1 else (1, 1)
        full_bytes = math.prod(whole.full_shape) * whole.values.element_size()
        fitting = (n for n in _STRIPS if columns % n == 0 and full_bytes >= n * _STRIP_BYTES)
        strips = next(fitting, 1) if rows < 2 * columns else 1
        if strips == 1:
            yield whole
            continue
        width = columns // strips
        begin, end = whole.place.begin[1], whole.place.end[1]
        while begin < end:
            stop = min((begin // width + 1) * width, end)
            ends = [
                (first, column, *rest)
                for (first, _, *rest), column in zip(whole.place, (begin, stop), strict=True)
            ]
            yield whole.within(Rectangle(*ends))
            begin = stop
