"""All that this project says to torch's Distributed Checkpoint, and the private names of it (tests/checkpoint/test_dcp.py).

Tensors go through planners of our own, subclasses of the public default ones: they emit one item a rectangle, where the default
ones know whole tensors, DTensors and ShardedTensors only.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from lightning_ptdp.checkpoint._index import read_index
from lightning_ptdp.checkpoint.archive import ArchiveWriter
from lightning_ptdp.checkpoint.boxes import Box
from lightning_ptdp.checkpoint.coverage import Rectangle, check_cover
from lightning_ptdp.checkpoint.errors import CheckpointError, explain
from lightning_ptdp.checkpoint.metadata import DCP_FILE, CheckpointMetadata, TensorEntry, read_sums, read_verified
from lightning_ptdp.checkpoint.stored import read_rectangle
from lightning_ptdp.checkpoint.sums import DATA_SUFFIX, BlockSums, SummedFile, open_summed, summing

__all__ = ["Reader", "check_index", "open_reader", "read_boxes", "write_boxes"]

T = TypeVar("T")


def write_boxes(
    folder: Path, boxes: Iterable[Box], group: dist.ProcessGroup | None = None, num_files: int = 1
) -> dict[str, TensorEntry]:
    """Write every rank's rectangles; collective over ``group`` (None: the default process group, if there is one).

    A rectangle that several ranks hold is written by one of them, chosen so that the ranks write about the same amount.

    Returns:
        Every full tensor by name, the same on all ranks.

    Raises:
        CheckpointException: Writing failed on some rank (raised by DCP on all of them).
        CheckpointError: The written files cannot all be seen from here.
    """
    # The filters of warnings are the whole process's: a thread that saves in the background leaves them alone.
    with nullcontext() if dist.is_available() and dist.is_initialized() else _quiet():
        metadata = dcp.save({}, storage_writer=_Writer(folder, num_files), planner=_SavePlanner(boxes), process_group=group)
    for name, size in _file_sizes(metadata).items():
        file = folder / name
        if not file.is_file() or file.stat().st_size < size:
            raise CheckpointError(f"{file} was written but is not seen here: all ranks must write to one shared file system")
    return {
        name: TensorEntry(shape=tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }


def open_reader(folder: Path, checkpoint: CheckpointMetadata) -> Reader:
    """A checkpoint's tensors, to read from several times.

    Raises:
        CheckpointError: The index is damaged.
    """
    read_verified(folder, checkpoint, DCP_FILE)
    return Reader(folder, checkpoint)


def read_boxes(reader: Reader, boxes: Iterable[Box]) -> None:
    """Fill this process's rectangles from the stored ones that overlap them; not collective.

    Raises:
        CheckpointError: Reading failed, what was read is damaged, or the stored rectangles do not cover what is asked for.
    """
    try:
        with _quiet():
            dcp.load({}, storage_reader=reader, planner=_LoadPlanner(boxes), no_dist=True)
    except dcp.CheckpointException as error:  # not an Exception: it would pass through the handlers of callers
        cause, _ = next(iter(error.failures.values()))
        raise CheckpointError(f"{reader.folder} cannot be read: {explain(cause)}") from cause


def check_index(folder: Path, checkpoint: CheckpointMetadata) -> None:
    """Compare DCP's index with ``metadata.json``: the same tensors, covered by their rectangles, in files that are listed.

    Raises:
        CheckpointError: They differ.
    """
    index = open_reader(folder, checkpoint).read_metadata()
    if index.state_dict_metadata.keys() != checkpoint.tensors.keys():
        raise CheckpointError(f"{folder} is damaged: {DCP_FILE} and metadata.json name other tensors")
    for name, entry in index.state_dict_metadata.items():
        assert isinstance(entry, dcp.TensorStorageMetadata)
        check_cover(name, checkpoint.tensors[name].shape, map(_extent, entry.chunks), f"in {folder}")
    for name in _file_sizes(index):
        if name not in checkpoint.files:
            raise CheckpointError(f"{folder} is damaged: {DCP_FILE} names {name}, which metadata.json does not list")


class _SavePlanner(dcp.DefaultSavePlanner):
    def __init__(self, boxes: Iterable[Box]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = {_index(box): box for box in boxes}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(index, box) for index, box in self._boxes.items()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], dcp.Metadata]:
        _check_same_tensors(all_plans)
        _check_whole_tensors(all_plans)  # torch looks for less, and does not say where
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._boxes[MetadataIndex(index.fqn, index.offset)].to_write()


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def __init__(self, boxes: Iterable[Box]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = {_index(box): box for box in boxes}

    def set_up_planner(self, state_dict: Any, metadata: dcp.Metadata | None = None, is_coordinator: bool = False) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> dcp.LoadPlan:
        assert self.metadata is not None
        items = []
        for index, box in self._boxes.items():
            entry = self.metadata.state_dict_metadata.get(box.name)
            assert isinstance(entry, dcp.TensorStorageMetadata), f"{box.name} is in metadata.json but not in {DCP_FILE}"
            reads = create_read_items_for_chunk_list(index.fqn, entry, [_chunk(box)])
            found = [(item.dest_offsets, item.lengths) for item in reads]
            check_cover(box.name, box.values.shape, (_from_to(*place) for place in found), "to load")
            items += reads
        return dcp.LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._boxes[MetadataIndex(index.fqn, index.offset)].values


class _Writer(dcp.FileSystemWriter):
    """Writes data files its own way (``ArchiveWriter``); DCP writes the index.

    Tells errors in full: DCP pickles them for the other ranks, which loses what they came from.
    """

    def __init__(self, folder: Path, num_files: int) -> None:
        super().__init__(folder)
        self._folder, self._num_files = folder, num_files

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        assert plan.storage_data is not None, "FileSystemWriter gives every rank a prefix of its files' names"
        names = [f"{plan.storage_data.prefix}{number}{DATA_SUFFIX}" for number in range(self._num_files)]
        shares = _shares(plan.items, self._num_files)
        try:
            if self._num_files == 1:
                written = [self._write_file(names[0], shares[0], planner)]
            else:
                with ThreadPoolExecutor(self._num_files) as pool:
                    written = list(pool.map(self._write_file, names, shares, [planner] * self._num_files))
        except Exception as error:
            raise CheckpointError(explain(error)) from None
        return _done([result for results in written for result in results])

    def _write_file(self, name: str, items: list[dcp.WriteItem], planner: dcp.SavePlanner) -> list[WriteResult]:
        results = []
        with summing(self._folder / name) as file:
            archives = ArchiveWriter(file)
            for item in items:
                values = planner.resolve_data(item)
                assert isinstance(values, torch.Tensor)
                position, length = archives.write(values.detach())
                place = _StorageInfo(relative_path=name, offset=position, length=length)
                results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=place))
        return results


class Reader(dcp.FileSystemReader):
    """Reads what is asked for and no more, and checks it."""

    def __init__(self, folder: Path, checkpoint: CheckpointMetadata) -> None:
        super().__init__(folder)
        self.folder, self._checkpoint = folder, checkpoint
        self._shapes: dict[str, dict[torch.Size, torch.Size]] = {}
        self._sums: dict[str, BlockSums] = {}
        try:
            self._index = read_index(folder / DCP_FILE)
        except Exception as error:
            raise CheckpointError(f"{folder / DCP_FILE} cannot be read: {explain(error)}") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        return self._index

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> torch.futures.Future[None]:
        """Only what is asked for, checked; DCP's own reads every stored tensor that is touched whole."""
        by_file: dict[str, list[dcp.ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            if name not in self._sums:
                self._sums[name] = read_sums(self.folder, self._checkpoint, name)
            with open_summed(self.folder / name, self._sums[name]) as file:
                for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
                    target = planner.resolve_tensor(item)
                    self._read(file, item, target.detach())
                    planner.commit_tensor(item, target)
        return _done(None)

    def _read(self, file: SummedFile, item: dcp.ReadItem, target: torch.Tensor) -> None:
        place, entry = self.storage_data[item.storage_index], self._index.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, dcp.TensorStorageMetadata)
        shapes = self._shapes.setdefault(item.storage_index.fqn, {chunk.offsets: chunk.sizes for chunk in entry.chunks})
        assert item.storage_index.offset is not None
        read_rectangle(
            file,
            target,
            start=place.offset,
            stop=place.offset + place.length,
            dtype=entry.properties.dtype,
            shape=shapes[item.storage_index.offset],
            offset=item.storage_offsets,
        )


def _index(box: Box) -> MetadataIndex:
    return MetadataIndex(box.name, torch.Size(box.offset))


def _chunk(box: Box) -> dcp.ChunkStorageMetadata:
    return dcp.ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=box.values.size())


def _write_item(index: MetadataIndex, box: Box) -> dcp.WriteItem:
    properties = TensorProperties(dtype=box.values.dtype)
    data = TensorWriteData(chunk=_chunk(box), properties=properties, size=torch.Size(box.full_shape))
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


def _check_same_tensors(plans: list[SavePlan]) -> None:
    """All ranks mean the same tensor by a name: torch takes the first rank's word for it."""
    known: dict[str, tuple[Any, Any, int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            assert item.tensor_data is not None
            shape, dtype = tuple(item.tensor_data.size), item.tensor_data.properties.dtype
            first = known.setdefault(item.index.fqn, (shape, dtype, rank))
            if first[:2] != (shape, dtype):
                raise CheckpointError(
                    f"{item.index.fqn!r} is {first[1]} of full shape {first[0]} on rank {first[2]}, "
                    f"but {dtype} of {shape} on rank {rank}"
                )


def _check_whole_tensors(plans: list[SavePlan]) -> None:
    """What the ranks have of each tensor makes it up. The same rectangle on several ranks counts once."""
    found: dict[str, set[Rectangle]] = {}
    shapes: dict[str, torch.Size] = {}
    for item in (item for plan in plans for item in plan.items):
        assert item.tensor_data is not None
        shapes[item.index.fqn] = item.tensor_data.size
        found.setdefault(item.index.fqn, set()).add(_extent(item.tensor_data.chunk))
    for name, rectangles in found.items():
        check_cover(name, shapes[name], rectangles, "to save")


def _extent(chunk: dcp.ChunkStorageMetadata) -> Rectangle:
    return _from_to(chunk.offsets, chunk.sizes)


def _from_to(offset: Sequence[int], size: Sequence[int]) -> Rectangle:
    return tuple(offset), tuple(begin + extent for begin, extent in zip(offset, size, strict=True))


def _file_sizes(metadata: dcp.Metadata) -> dict[str, int]:
    """Least size of every data file, from the index (its entries are of a private class of torch)."""
    sizes: dict[str, int] = {}
    for entry in (metadata.storage_data or {}).values():
        sizes[entry.relative_path] = max(sizes.get(entry.relative_path, 0), entry.offset + entry.length)
    return sizes


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns when it runs in one process, which is what a single-device run asks for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
