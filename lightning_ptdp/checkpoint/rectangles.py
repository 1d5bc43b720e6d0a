"""Rectangles of a checkpoint's tensors, read from those that are stored and checked."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lightning_ptdp.checkpoint.boxes import Box
from lightning_ptdp.checkpoint.coverage import Rectangle, check_cover
from lightning_ptdp.checkpoint.errors import CheckpointError
from lightning_ptdp.checkpoint.index import Chunk, open_index
from lightning_ptdp.checkpoint.metadata import CheckpointMetadata, read_sums
from lightning_ptdp.checkpoint.stored import read_rectangle
from lightning_ptdp.checkpoint.sums import BlockSums, open_summed

__all__ = ["RectangleReader"]


class RectangleReader:
    """Reads what is asked for and no more, and checks it; may be asked several times.

    Args:
        folder: The checkpoint.
        metadata: What it says of itself.

    Raises:
        CheckpointError: The index is damaged.
    """

    def __init__(self, folder: Path, metadata: CheckpointMetadata) -> None:
        self._folder, self._metadata = folder, metadata
        self._index = open_index(folder, metadata)
        self._sums: dict[str, BlockSums] = {}

    def read(self, boxes: Iterable[Box]) -> None:
        """Fill this process's rectangles from the stored ones that overlap them; not collective.

        Raises:
            CheckpointError: Reading failed, what was read is damaged, or the stored rectangles do not cover what is asked for.
        """
        by_file: dict[str, list[tuple[Chunk, Box, Rectangle]]] = {}
        for box in boxes:
            for chunk, part in self._parts(box):
                by_file.setdefault(chunk.file, []).append((chunk, box, part))
        for name, parts in by_file.items():
            try:
                self._read_file(name, parts)
            except OSError as error:
                raise CheckpointError(f"{self._folder / name} cannot be read: {error.strerror}") from error

    def _parts(self, box: Box) -> list[tuple[Chunk, Rectangle]]:
        """The stored rectangles that overlap one, and where they do so in the full tensor."""
        end = _moved(box.values.shape, box.offset)
        found = []
        for chunk in self._index.chunks(box.name):
            first = tuple(map(max, chunk.offset, box.offset))
            last = tuple(map(min, _moved(chunk.shape, chunk.offset), end))
            if all(low < high for low, high in zip(first, last, strict=True)):
                found.append((chunk, (first, last)))
        places = ((_moved(first, box.offset, -1), _moved(last, box.offset, -1)) for _, (first, last) in found)
        check_cover(box.name, box.values.shape, places, "to load")
        return found

    def _read_file(self, name: str, parts: list[tuple[Chunk, Box, Rectangle]]) -> None:
        if name not in self._sums:
            self._sums[name] = read_sums(self._folder, self._metadata, name)
        with open_summed(self._folder / name, self._sums[name]) as file:
            for chunk, box, (first, last) in sorted(parts, key=lambda part: part[0].begin):
                place = zip(_moved(first, box.offset, -1), _moved(last, box.offset, -1), strict=True)
                read_rectangle(
                    file,
                    box.values[tuple(slice(low, high) for low, high in place)],
                    begin=self._index.find(file, chunk.begin),
                    dtype=self._metadata.tensors[box.name].dtype,
                    shape=chunk.shape,
                    offset=_moved(first, chunk.offset, -1),
                )


def _moved(place: Iterable[int], by: Iterable[int], sign: int = 1) -> tuple[int, ...]:
    return tuple(at + sign * step for at, step in zip(place, by, strict=True))
