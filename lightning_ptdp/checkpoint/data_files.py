"""Data files of a checkpoint: safetensors files, of which each rank writes its own.

``rank0-0.safetensors`` is the first file of rank 0. A tensor in it is a rectangle of a full tensor,
named after the full tensor and the rectangle's offset: ``model/head.weight@128,0``. Values are
gathered, summed (``checksums.py``) and written in pieces, each while it is in the processor's
cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from threading import Lock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.checkpoint.checksums import BLOCK, DATA_SUFFIX, SUMS_SUFFIX, summing
from lightning_ptdp.checkpoint.index import StoredRectangle
from lightning_ptdp.checkpoint.local_rectangles import (
    Held,
    LocalRectangle,
    check_held,
    choose_writers,
)
from lightning_ptdp.checkpoint.metadata import FileEntry, TensorEntry, write_small
from lightning_ptdp.checkpoint.remote_path import Place, RemotePath, each
from lightning_ptdp.checkpoint.save_agreement import (
    CheckpointError,
    gather,
    is_rank_zero,
    own_rank,
    same_outcome,
)
from lightning_ptdp.checkpoint.stored_tensor import PIECE, as_bytes, rows_at_once
from lightning_ptdp.checkpoint.tensor_files import header_of, is_storable

# In larger files, a header that fills whole blocks is negligible.
_ALIGNED_BYTES = 1 << 20
_OBJECT_BYTES = 1 << 26  # of a file in object storage, which is in memory until it is sent
_Stored = tuple[list[tuple[str, StoredRectangle]], dict[str, FileEntry]]
"""Rectangles of a data file, each with its tensor's name, and the entries of it and its sums."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """Rectangles and files that all ranks have written.

    Attributes:
        rectangles: Rectangles of each full tensor, by its name.
        entries: Every written file by its name.
    """

    rectangles: Mapping[str, Sequence[StoredRectangle]]
    entries: Mapping[str, FileEntry]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The rectangles that one rank writes.

    Attributes:
        rectangles: The rectangles, with their values.
        tensors: Every full tensor by name.
        held: All rectangles of the rank.
    """

    rectangles: Sequence[LocalRectangle]
    tensors: Mapping[str, TensorEntry]
    held: Sequence[Held]


def assign(
    rectangles: Iterable[LocalRectangle],
    *,
    doing: str,
    group: dist.ProcessGroup | None = None,
    known: Assignment | None = None,
) -> Assignment:
    """Choose the rectangles that this rank writes; collective over ``group`` (None: all ranks).

    A rectangle that several ranks hold is written by one of them, so that the ranks write about the
    same amount.

    Args:
        rectangles: Rectangles of this rank.
        doing: Action for messages, such as "saving the checkpoint last.ckpt".
        group: Ranks that write.
        known: Result of an earlier call. It is reused if the rectangles of all ranks are unchanged.

    Raises:
        CheckpointError: On every rank: the ranks' rectangles are not the full tensors.
    """
    with same_outcome(doing, group):
        local = {(rectangle.name, rectangle.place): rectangle for rectangle in rectangles}
        own = [Held.of(rectangle) for rectangle in local.values()]
    if known is not None and all(gather(own == known.held, group)):
        return replace(known, rectangles=[local[one.name, one.place] for one in known.rectangles])
    held = gather(own, group)
    with same_outcome(doing, group):
        tensors = check_held(held, "to save")
        share = choose_writers(held)[own_rank(group)]
    return Assignment(
        rectangles=[local[key] for key in local if key in share], tensors=tensors, held=own
    )


def write_rectangles(
    folder: Place,
    assigned: Sequence[LocalRectangle],
    *,
    doing: str,
    group: dist.ProcessGroup | None = None,
    num_files: int = 1,
) -> Written:
    """Write the rectangles that :func:`assign` has returned; collective.

    Args:
        folder: The folder, which all ranks share.
        assigned: Rectangles of this rank.
        doing: Action for messages.
        group: Ranks that write; ``folder`` is one folder for all of them.
        num_files: Files of this rank, written in as many threads.

    Raises:
        CheckpointError: On every rank: a file could not be written, or rank 0 does not see the file
            of another rank.
    """
    with same_outcome(doing, group):
        stored = _write(folder, own_rank(group), assigned, num_files)
    by_name: dict[str, list[StoredRectangle]] = {}
    entries: dict[str, FileEntry] = {}
    for placed, written in chain.from_iterable(gather(stored, group)):
        entries |= written
        for name, rectangle in placed:
            by_name.setdefault(name, []).append(rectangle)
    with same_outcome(doing, group):
        if is_rank_zero(group) and (unseen := _unseen(folder, {*entries})):
            raise CheckpointError(
                f"{folder / unseen[0]} was written but is not visible to this rank. All ranks "
                "must write to one shared file system"
            )
    return Written(rectangles=by_name, entries=entries)


def write_data_file(
    path: Place,
    rectangles: Sequence[LocalRectangle],
    turn: AbstractContextManager[object] | None = None,
) -> _Stored:
    """Write one file and its checksums; return the name and place of each rectangle, and entries.

    The entries are those of both files, by name. An object is gathered within ``turn``, and sent
    afterwards.
    """
    # Tensors of whole blocks come first, and the largest of the others next, to begin at a block.
    ordered = sorted(
        rectangles,
        key=lambda rectangle: (rectangle.nbytes % BLOCK > 0, -rectangle.nbytes),
    )
    align = BLOCK if sum(rectangle.nbytes for rectangle in ordered) > _ALIGNED_BYTES else 8
    header, begins = header_of(
        {_key(rectangle): _entry(rectangle) for rectangle in ordered}, align=align
    )
    stored = []
    ends = [begins[_key(rectangle)] + rectangle.nbytes for rectangle in ordered]
    with summing(path, max(ends, default=len(header))) as file:
        with turn or nullcontext():
            file.write(header)
            for rectangle in ordered:
                begin = begins[_key(rectangle)]
                assert file.position == begin, (rectangle.name, file.position, begin)
                for piece in pieces_of(rectangle.to_write().detach()):
                    file.write(piece)
                place = StoredRectangle(file=path.name, begin=begin, place=rectangle.place)
                stored.append((rectangle.name, place))
        sums = path.with_suffix(SUMS_SUFFIX)
        entries = {sums.name: write_small(sums, file.finish())}
    return stored, entries | {path.name: FileEntry(size=file.position)}


def _write(
    folder: Place, rank: int, rectangles: Sequence[LocalRectangle], num_files: int
) -> list[_Stored]:
    folder.mkdir(parents=True, exist_ok=True)  # rank 0 checks later that it sees the same folder
    if isinstance(folder, RemotePath):
        rectangles = [
            piece for rectangle in rectangles for piece in rectangle.pieces(_OBJECT_BYTES)
        ]
        total = sum(rectangle.nbytes for rectangle in rectangles)
        num_files = max(num_files, -(-total // _OBJECT_BYTES))
    shares = [share for share in _shares(rectangles, num_files) if share]
    paths = [folder / f"rank{rank}-{number}{DATA_SUFFIX}" for number in range(len(shares))]
    # One object is gathered while others are sent.
    turn = Lock() if isinstance(folder, RemotePath) else None
    return each(
        folder,
        lambda pair: write_data_file(*pair, turn),
        zip(paths, shares, strict=True),
        threads=len(shares),
    )


def _unseen(folder: Place, names: set[str]) -> list[str]:
    if isinstance(folder, RemotePath):
        return sorted(names - {entry.name for entry in folder.iterdir()})
    return sorted(name for name in names if not (folder / name).is_file())


def _shares(rectangles: Sequence[LocalRectangle], count: int) -> list[list[LocalRectangle]]:
    """Return ``count`` lists of about as many bytes each."""
    shares: list[list[LocalRectangle]] = [[] for _ in range(count)]
    sizes = [0] * count
    for rectangle in sorted(rectangles, key=lambda rectangle: rectangle.nbytes, reverse=True):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(rectangle)
        sizes[smallest] += rectangle.nbytes
    return shares


def _key(rectangle: LocalRectangle) -> str:
    return f"{rectangle.name}@{','.join(map(str, rectangle.offset))}"


def _entry(rectangle: LocalRectangle) -> TensorEntry:
    """Return the rectangle's entry in a header; a dtype without a code is stored as bytes."""
    shape, dtype = tuple(rectangle.values.shape), rectangle.values.dtype
    if is_storable(dtype):
        return TensorEntry(shape=shape, dtype=dtype)
    return TensorEntry(shape=(*shape, dtype.itemsize), dtype=torch.uint8)


# ---- Values of a tensor as bytes, in pieces that fit a processor's cache -------------------------


_STAGED = 32 << 20  # bytes that a GPU copies at a time: enough for the speed of its bus


def pieces_of(values: Tensor) -> Iterator[memoryview]:
    """Yield the values row by row; every piece but the last ends where a block ends.

    A piece is valid until the next one is requested.
    """
    if not values.numel():
        return
    values = values.resolve_conj().resolve_neg()  # a lazy view has other bytes than values
    if values.is_cpu and values.is_contiguous():
        yield from _cut(values)
        return
    values = torch.atleast_1d(values)
    row_bytes = values[0].numel() * values.element_size()
    if values.is_cuda:
        for part in _staged(values, rows_at_once(row_bytes, _STAGED)):
            yield from _cut(part)
        return
    count = rows_at_once(row_bytes)
    buffer = torch.empty_like(values[:count], device="cpu", memory_format=torch.contiguous_format)
    for rows in values.split(count):
        part = buffer[: len(rows)]
        if rows.is_cpu and rows.stride(-1) == 1:  # torch copies short rows at half the speed
            np.copyto(part.view(torch.uint8).numpy(), rows.view(torch.uint8).numpy())
        else:
            part.copy_(rows)
        yield as_bytes(part)


def _cut(values: Tensor) -> Iterator[memoryview]:
    content = as_bytes(values)
    for begin in range(0, len(content), PIECE):
        yield content[begin : begin + PIECE]


def _staged(values: Tensor, count: int) -> Iterator[Tensor]:
    """Yield ``count`` rows of a GPU's tensor at a time, while it copies the next ones.

    Rows are valid until the next ones are requested. There are two buffers in page-locked memory.
    """
    shape, buffers = (min(count, len(values)), *values.shape[1:]), list[Tensor]()
    pending: Tensor | None = None
    event = torch.cuda.Event()
    for index, rows in enumerate(values.split(count)):
        if len(buffers) < 2:
            buffers.append(torch.empty(shape, dtype=values.dtype, pin_memory=True))
        if pending is not None:
            event.synchronize()
        part = buffers[index % 2][: len(rows)].copy_(rows, non_blocking=True)
        event.record(torch.cuda.current_stream(values.device))
        if pending is not None:
            yield pending
        pending = part
    event.synchronize()
    assert pending is not None
    yield pending
