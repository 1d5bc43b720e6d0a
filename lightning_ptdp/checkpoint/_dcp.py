"""All that this project says to torch's Distributed Checkpoint, and the private names of it
(tests/checkpoint/test_dcp.py).

Tensors go through a planner of our own, a subclass of the public default one: it emits one item a
rectangle, where the default one knows whole tensors, DTensors and ShardedTensors only. What torch's
tools read is only written: its index is a pickle, which runs what a file tells it to when it is
read."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from lightning_ptdp.checkpoint.archive import write_archive
from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError, explain
from lightning_ptdp.checkpoint.checksums import DATA_SUFFIX, summing
from lightning_ptdp.checkpoint.index import StoredRectangle
from lightning_ptdp.checkpoint.local_rectangles import LocalRectangle
from lightning_ptdp.checkpoint.metadata import TensorEntry
from lightning_ptdp.checkpoint.rectangle_owners import Held, check_held
from lightning_ptdp.checkpoint.rectangles import Rectangle

__all__ = ["Written", "write_rectangles"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Written:
    """Tensors and files that all ranks have written.

    Attributes:
        tensors: Every full tensor by name, the same on all ranks.
        rectangles: On rank 0, those of each of them.
    """

    tensors: Mapping[str, TensorEntry]
    rectangles: Mapping[str, Sequence[StoredRectangle]]


def write_rectangles(
    folder: Path,
    rectangles: Iterable[LocalRectangle],
    group: dist.ProcessGroup | None = None,
    num_files: int = 1,
) -> Written:
    """Write every rank's rectangles; collective over ``group`` (None: the default process group, if
    there is one).

    A rectangle that several ranks hold is written by one of them, chosen so that the ranks write
    about the same amount.

    Raises:
        CheckpointException: Writing failed on some rank (raised by DCP on all of them).
        CheckpointError: The written files cannot all be seen from here.
    """
    joined = dist.is_available() and dist.is_initialized()
    # The filters of warnings are the whole process's: a thread that saves in the background leaves
    # them alone.
    with nullcontext() if joined else warnings.catch_warnings():
        if not joined:  # which is what a single-device run asks for
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        writer = _Writer(folder, num_files)
        metadata = dcp.save(
            {}, storage_writer=writer, planner=_SavePlanner(rectangles), process_group=group
        )
    for name, size in _file_sizes(metadata).items():
        file = folder / name
        if not file.is_file() or file.stat().st_size < size:
            raise CheckpointError(
                f"{file} was written but is not seen here: all ranks must write to one shared "
                "file system"
            )
    tensors = {
        name: TensorEntry(shape=tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }
    return Written(tensors=tensors, rectangles=writer.rectangles)


class _SavePlanner(dcp.DefaultSavePlanner):
    def __init__(self, rectangles: Iterable[LocalRectangle]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._rectangles = {
            MetadataIndex(one.name, torch.Size(one.offset)): one for one in rectangles
        }

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(index, one) for index, one in self._rectangles.items()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], dcp.Metadata]:
        check_held(
            [[*map(_held, plan.items)] for plan in all_plans], "to save"
        )  # torch looks for less, and does not say where
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._rectangles[MetadataIndex(index.fqn, index.offset)].to_write()


@dataclass(frozen=True)
class _Result(WriteResult):
    """Result of writing a rectangle, for DCP and for our own index."""

    rectangle: StoredRectangle


class _Writer(dcp.FileSystemWriter):
    """Writes data files its own way (archive.py); DCP writes the index.

    Tells errors in full: DCP pickles them for the other ranks, which loses what they came from.
    """

    def __init__(self, folder: Path, num_files: int) -> None:
        super().__init__(folder)
        self._folder, self._num_files = folder, num_files
        self.rectangles: dict[str, list[StoredRectangle]] = {}

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, with what all have written."""
        for result in (result for rank in results for result in rank):
            assert isinstance(result, _Result)
            self.rectangles.setdefault(result.index.fqn, []).append(result.rectangle)
        super().finish(metadata, results)

    def write_data(
        self, plan: SavePlan, planner: dcp.SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        assert plan.storage_data is not None, (
            "FileSystemWriter gives every rank a prefix of its files' names"
        )
        names = [
            f"{plan.storage_data.prefix}{number}{DATA_SUFFIX}" for number in range(self._num_files)
        ]
        shares = _shares(plan.items, self._num_files)
        try:
            if self._num_files == 1:
                written = [self._write_file(names[0], shares[0], planner)]
            else:
                with ThreadPoolExecutor(self._num_files) as pool:
                    written = list(
                        pool.map(self._write_file, names, shares, [planner] * self._num_files)
                    )
        except Exception as error:
            raise CheckpointError(explain(error)) from None
        return _done([result for results in written for result in results])

    def _write_file(
        self, name: str, items: list[dcp.WriteItem], planner: dcp.SavePlanner
    ) -> list[WriteResult]:
        results: list[WriteResult] = []
        with summing(self._folder / name) as file:
            for item in items:
                values = planner.resolve_data(item)
                assert isinstance(values, torch.Tensor)
                position, begin, length = write_archive(file, values.detach())
                place = _StorageInfo(relative_path=name, offset=position, length=length)
                assert item.index.offset is not None
                rectangle = StoredRectangle(
                    file=name, begin=begin, place=Rectangle.at(item.index.offset, values.shape)
                )
                results.append(
                    _Result(
                        index=item.index,
                        size_in_bytes=length,
                        storage_data=place,
                        rectangle=rectangle,
                    )
                )
        return results


def _write_item(index: MetadataIndex, rectangle: LocalRectangle) -> dcp.WriteItem:
    data = TensorWriteData(
        chunk=dcp.ChunkStorageMetadata(
            offsets=torch.Size(rectangle.offset), sizes=rectangle.values.size()
        ),
        properties=TensorProperties(dtype=rectangle.values.dtype),
        size=torch.Size(rectangle.full_shape),
    )
    return dcp.WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


def _shares(items: list[dcp.WriteItem], count: int) -> list[list[dcp.WriteItem]]:
    """``count`` lists of about as many bytes each."""
    shares: list[list[dcp.WriteItem]] = [[] for _ in range(count)]
    sizes = [0] * count
    for item in sorted(items, key=_num_bytes, reverse=True) if count > 1 else items:
        smallest = sizes.index(min(sizes))
        shares[smallest].append(item)
        sizes[smallest] += _num_bytes(item)
    return shares


def _num_bytes(item: dcp.WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _done(value: T) -> torch.futures.Future[T]:
    future: torch.futures.Future[T] = torch.futures.Future()
    future.set_result(value)
    return future


def _held(item: dcp.WriteItem) -> Held:
    assert item.tensor_data is not None
    entry = TensorEntry(shape=tuple(item.tensor_data.size), dtype=item.tensor_data.properties.dtype)
    return Held(
        item.index.fqn,
        entry,
        Rectangle.at(item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes),
    )


def _file_sizes(metadata: dcp.Metadata) -> dict[str, int]:
    """Least size of every data file, from the index (its entries are of a private class of
    torch)."""
    sizes: dict[str, int] = {}
    for entry in (metadata.storage_data or {}).values():
        sizes[entry.relative_path] = max(
            sizes.get(entry.relative_path, 0), entry.offset + entry.length
        )
    return sizes
