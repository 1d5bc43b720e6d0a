"""Single tensors of a checkpoint, read one after the other in one process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_ptdp.checkpoint.boxes import Box
from lightning_ptdp.checkpoint.metadata import CheckpointMetadata, read_metadata
from lightning_ptdp.checkpoint.rectangles import RectangleReader

__all__ = ["TensorReader"]


class TensorReader:
    """A checkpoint that is asked for tensors by name; holds its index, not its tensors.

    Args:
        path: The checkpoint folder.

    Raises:
        CheckpointError: It is not a checkpoint, or its index is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.metadata: CheckpointMetadata = read_metadata(path)
        self._reader = RectangleReader(Path(path), self.metadata)

    def read(self, name: str, *, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor by its global name, on the CPU in its stored dtype: all of it, or the rectangle of ``shape`` at ``offset``.

        Raises:
            CheckpointError: What was read is damaged.
        """
        entry = self.metadata.tensors[name]
        values = torch.empty(entry.shape if shape is None else tuple(shape), dtype=entry.dtype)
        if values.numel():
            place = tuple(offset)[: values.dim()] if offset is not None else (0,) * values.dim()
            self._reader.read([Box(name=name, full_shape=entry.shape, offset=place, values=values)])
        return values
