"""Writer of a Hugging Face folder, used by all ranks that hold a part of the model.

The position of each byte follows from names, shapes and dtypes alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lightning_ptdp.checkpoint import CheckpointError, LocalRectangle, TensorEntry, files
from lightning_ptdp.checkpoint.stored_tensor import as_bytes, runs
from lightning_ptdp.checkpoint.tensor_files import header_of
from lightning_ptdp.exchange.model_folder import INDEX_FILE, ONE_FILE
from lightning_ptdp.exchange.tensor_views import View

_BLOCK = 1 << 24
"""Number of bytes of a rectangle that are copied to convert and gather them.

A rectangle is written in blocks of this size, so that memory holds one block twice.
"""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One tensor of a Hugging Face folder.

    Attributes:
        stored: Name in a checkpoint of the native tensor that contains it.
        view: Its part of the native tensor.
        entry: Its shape and dtype in the file.
    """

    stored: str
    view: View
    entry: TensorEntry


@dataclass(frozen=True)
class FolderPlan:
    """File and position of every tensor.

    Attributes:
        items: The tensors by name.
        heads: File name -> the bytes before the values.
        places: Tensor name -> its file, and the byte of the file at which its values begin.
    """

    items: Mapping[str, Item]
    heads: Mapping[str, bytes]
    places: Mapping[str, tuple[str, int]]

    @classmethod
    def of(cls, items: Mapping[str, Item], *, shard_bytes: int) -> FolderPlan:
        """Return a plan that keeps the order of the tensors.

        Each file has at most ``shard_bytes`` bytes of tensors, or one larger tensor.

        Raises:
            CheckpointError: ``shard_bytes`` is not positive, or a dtype cannot be stored.
        """
        shards = _shards(items, shard_bytes)
        count = len(shards)
        names = (
            [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
            if count > 1
            else [ONE_FILE]
        )
        heads: dict[str, bytes] = {}
        places: dict[str, tuple[str, int]] = {}
        for file, shard in zip(names, shards, strict=True):
            heads[file], begins = header_of(
                {name: items[name].entry for name in shard}, metadata={"format": "pt"}
            )
            places |= {name: (file, begin) for name, begin in begins.items()}
        return cls(items, heads, places)

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(item.entry.num_bytes for item in self.items.values())

    def create(self, folder: Path, documents: Mapping[str, bytes]) -> None:
        """Create the folder and all its content except the values, for which it reserves space.

        Args:
            folder: A path that does not exist yet.
            documents: The additional files: name -> content.

        Raises:
            OSError: A file cannot be written.
        """
        folder.mkdir()
        if len(self.heads) > 1:
            index = {
                "metadata": {"total_size": self.num_bytes},
                "weight_map": {name: file for name, (file, _) in self.places.items()},
            }
            documents = {**documents, INDEX_FILE: (json.dumps(index, indent=2) + "\n").encode()}
        for name, content in {files.EXPORT_MARK: b"", **self.heads, **documents}.items():
            with files.open_synced(folder / name) as stream:
                stream.write(content)
        ends = {
            file: begin + self.items[name].entry.num_bytes
            for name, (file, begin) in self.places.items()
        }
        for file, end in ends.items():
            os.truncate(folder / file, end)

    def fill(self, folder: Path, rectangles: Iterable[LocalRectangle]) -> None:
        """Write the values of native rectangles to their positions, one block at a time.

        Rectangles that are in no item are skipped.

        Raises:
            CheckpointError: A file that another rank has created is not visible here.
            OSError: A file cannot be written.
        """
        by_name: dict[str, list[LocalRectangle]] = {}
        for rectangle in rectangles:
            by_name.setdefault(rectangle.name, []).append(rectangle)
        for file in self.heads:
            item_names = [
                name
                for name, (item_file, _) in self.places.items()
                if item_file == file and self.items[name].stored in by_name
            ]
            if not item_names:
                continue
            try:
                handle = os.open(folder / file, os.O_WRONLY)
            except FileNotFoundError:
                raise CheckpointError(
                    f"{folder / file} was written but is not visible to this rank. All ranks "
                    "must write to one shared file system"
                ) from None
            with (
                os.fdopen(handle, "wb", buffering=0) as stream,
                closing(files.EarlySync(stream)) as sync,
            ):
                done = 0
                for name in item_names:
                    for rectangle in by_name[self.items[name].stored]:
                        place = rectangle.place.common(self.items[name].view.place)
                        for block in rectangle.within(place).pieces(_BLOCK) if place.numel else ():
                            done += self._write(handle, name, block)
                            sync.reached(done)
                sync.wait()
                os.fsync(handle)

    def _write(self, handle: int, name: str, block: LocalRectangle) -> int:
        item = self.items[name]
        _, begin = self.places[name]
        place = item.view.in_file(block.place)
        content = as_bytes(
            item.view.turned(block.to_write().to(item.entry.dtype)).cpu().contiguous()
        )
        done = 0
        for first, last in runs(
            item.entry.shape, place.begin, place.shape, itemsize=item.entry.dtype.itemsize, gap=1
        ):
            while first < last:
                count = os.pwrite(handle, content[done : done + last - first], begin + first)
                first = first + count
                done = done + count
        assert done == len(content), name
        return done


def _shards(items: Mapping[str, Item], limit: int) -> list[list[str]]:
    if limit < 1:
        raise CheckpointError(f"shard_bytes={limit} must be a positive number of bytes")
    shards: list[list[str]] = [[]]
    size = 0
    for name, item in items.items():
        if shards[-1] and size + item.entry.num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += item.entry.num_bytes
    return shards
