"""Rectangles of the full tensors that a rank holds; storage knows no other description of
shardings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError
from lightning_ptdp.checkpoint.rectangles import Rectangle

__all__ = ["LocalRectangle", "Placed", "Tensors", "cut_strips", "rectangles_of"]


class Placed(Protocol):
    """Position of a local tensor in its full one: a ``Sharding``, or a sharded optimizer's part of
    one."""

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""

    def held(self, local: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """(offset in the full tensor, view of ``local``) of every rectangle that is here."""


Tensors = Mapping[str, tuple[torch.Tensor, Placed]]
_STRIPS = (8, 4, 2)
_STRIP_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LocalRectangle:
    """One rectangle of one full tensor, with its values.

    Attributes:
        name: Global name of the full tensor.
        full_shape: Shape of the full tensor.
        offset: Where the rectangle begins in the full tensor.
        values: A view of the local tensor with the rectangle's extent: writing to it writes to the
            local tensor. To save what is not in memory: a tensor on the meta device, whose values
            ``read`` gives when they are written.
        read: From the offset and the shape of a part of the rectangle, its values.
    """

    name: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: torch.Tensor
    read: Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor] | None = None

    @classmethod
    def whole(cls, name: str, values: torch.Tensor) -> LocalRectangle:
        """All of a tensor."""
        return cls(
            name=name, full_shape=tuple(values.shape), offset=(0,) * values.dim(), values=values
        )

    @property
    def place(self) -> Rectangle:
        """Return the position in the full tensor."""
        return Rectangle.at(self.offset, self.values.shape)

    def within(self, place: Rectangle) -> LocalRectangle:
        """The part of it at ``place`` of the full tensor."""
        return replace(
            self, offset=place.begin, values=self.values[place.seen_from(self.offset).slices]
        )

    def to_write(self) -> torch.Tensor:
        """The values, wherever they are and however they lie there."""
        return (
            self.values if self.read is None else self.read(self.offset, tuple(self.values.shape))
        )


def rectangles_of(tensors: Tensors) -> list[LocalRectangle]:
    """The rectangles of local tensors; local elements that are in none of the sharding's (padding)
    are in none.

    Raises:
        CheckpointError: A tensor does not have its sharding's local shape.
    """
    found = []
    for name, (tensor, sharding) in tensors.items():
        if tuple(tensor.shape) != sharding.local_shape:
            raise CheckpointError(
                f"{name!r} has the local shape {tuple(tensor.shape)}, but its sharding says "
                f"{sharding.local_shape}"
            )
        for offset, values in sharding.held(tensor.detach()):
            found.append(
                LocalRectangle(
                    name=name, full_shape=sharding.full_shape, offset=offset, values=values
                )
            )
    return found


def cut_strips(rectangles: Iterable[LocalRectangle]) -> Iterator[LocalRectangle]:
    """The rectangles of large matrices cut along dimension 1 where their full tensors' eighths
    meet, if an eighth is a MiB or more (else quarters, else halves).

    Rows lie one after the other in a file, so that any rows are read alone; columns would be small
    runs of every row. With the strips a rank of up to eight that split a matrix by columns reads
    its own only. Where a full tensor is cut does not depend on who holds it. A matrix that is twice
    as tall as it is wide, or more, is not cut: such are vocabularies and layers that widen, which
    ranks split by rows (arXiv 1909.08053, section 3), and strips cost the save a copy."""
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
