"""Data files of a checkpoint: safetensors files, of which each rank writes its own.

``rank0-0.safetensors`` is the first file of rank 0. A tensor in it is a rectangle of a full tensor,
named after the full tensor and the rectangle's offset: ``model/head.weight@128,0``. Values are
gathered, summed (``checksums.py``) and written in pieces, each while it is in the processor's
cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError
from lightning_ptdp.checkpoint.checksums import BLOCK, DATA_SUFFIX, pieces_of, summing
from lightning_ptdp.checkpoint.index import StoredRectangle
from lightning_ptdp.checkpoint.local_rectangles import Held, LocalRectangle, check_held, share_out
from lightning_ptdp.checkpoint.metadata import TensorEntry
from lightning_ptdp.checkpoint.safetensors_file import header_of, is_storable
from lightning_ptdp.checkpoint.save_agreement import gather, is_rank_zero, own_rank, same_outcome

__all__ = ["Written", "write_data_file", "write_rectangles"]

# In larger files, a header that fills whole blocks is negligible.
_ALIGNED_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Written:
    """Tensors and rectangles that all ranks have written.

    Attributes:
        tensors: Every full tensor by name.
        rectangles: Rectangles of each full tensor, by its name.
    """

    tensors: Mapping[str, TensorEntry]
    rectangles: Mapping[str, Sequence[StoredRectangle]]


def write_rectangles(
    folder: Path,
    rectangles: Iterable[LocalRectangle],
    *,
    doing: str,
    group: dist.ProcessGroup | None = None,
    num_files: int = 1,
) -> Written:
    """Write every rank's rectangles; collective over ``group`` (None: all ranks).

    A rectangle that several ranks hold is written by one of them, so that the ranks write about the
    same amount.

    Args:
        folder: The folder, which all ranks share.
        rectangles: Rectangles of this rank.
        doing: Action for messages, such as "saving the checkpoint last.ckpt".
        group: Ranks that write.
        num_files: Files of this rank, written in as many threads.

    Raises:
        CheckpointError: On every rank: the ranks' rectangles are not the whole tensors, a file
            could not be written, or rank 0 does not see the file of another rank.
    """
    with same_outcome(doing, group):
        local = {(one.name, one.place): one for one in rectangles}
    ranks = gather([Held.of(one) for one in local.values()], group)
    with same_outcome(doing, group):
        tensors = check_held(ranks, "to save")
        own = share_out(ranks)[own_rank()]
        stored = _write(folder, [local[key] for key in local if key in own], num_files)
    found: dict[str, list[StoredRectangle]] = {}
    for name, rectangle in (pair for pairs in gather(stored, group) for pair in pairs):
        found.setdefault(name, []).append(rectangle)
    with same_outcome(doing, group):
        names = {one.file for stored_ones in found.values() for one in stored_ones}
        if is_rank_zero() and (unseen := sorted(n for n in names if not (folder / n).is_file())):
            raise CheckpointError(
                f"{folder / unseen[0]} was written but is not visible to this rank. All ranks "
                "must write to one shared file system"
            )
    return Written(tensors=tensors, rectangles=found)


def write_data_file(
    path: Path, rectangles: Sequence[LocalRectangle]
) -> list[tuple[str, StoredRectangle]]:
    """Write one file and its checksums; return the name and place of each rectangle."""
    # Tensors of whole blocks come first, and the largest of the others next, to begin at a block.
    ordered = sorted(
        rectangles, key=lambda one: (one.values.nbytes % BLOCK > 0, -one.values.nbytes)
    )
    align = BLOCK if sum(one.values.nbytes for one in ordered) > _ALIGNED_BYTES else 8
    head, begins = header_of({_key(one): _entry(one) for one in ordered}, align=align)
    stored = []
    with summing(path) as file:
        file.write(head)
        for one in ordered:
            begin = begins[_key(one)]
            assert file.position == begin, (one.name, file.position, begin)
            for piece in pieces_of(one.to_write().detach()):
                file.write(piece)
            place = StoredRectangle(file=path.name, begin=begin, place=one.place)
            stored.append((one.name, place))
    return stored


def _write(
    folder: Path, rectangles: Sequence[LocalRectangle], num_files: int
) -> list[tuple[str, StoredRectangle]]:
    folder.mkdir(parents=True, exist_ok=True)  # rank 0 looks whether it sees the same one
    shares = [share for share in _shares(rectangles, num_files) if share]
    names = [f"rank{own_rank()}-{number}{DATA_SUFFIX}" for number in range(len(shares))]
    paths = [folder / name for name in names]
    if len(shares) < 2:
        written = list(map(write_data_file, paths, shares))
    else:
        with ThreadPoolExecutor(len(shares)) as pool:
            written = list(pool.map(write_data_file, paths, shares))
    return [pair for pairs in written for pair in pairs]


def _shares(rectangles: Sequence[LocalRectangle], count: int) -> list[list[LocalRectangle]]:
    """Return ``count`` lists of about as many bytes each."""
    if count == 1:
        return [list(rectangles)]
    shares: list[list[LocalRectangle]] = [[] for _ in range(count)]
    sizes = [0] * count
    for one in sorted(rectangles, key=lambda one: one.values.nbytes, reverse=True):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(one)
        sizes[smallest] += one.values.nbytes
    return shares


def _key(one: LocalRectangle) -> str:
    return f"{one.name}@{','.join(map(str, one.offset))}"


def _entry(one: LocalRectangle) -> TensorEntry:
    """Return the rectangle's entry in a header; a dtype without a code is stored as bytes."""
    shape, dtype = tuple(one.values.shape), one.values.dtype
    if is_storable(dtype):
        return TensorEntry(shape=shape, dtype=dtype)
    return TensorEntry(shape=(*shape, dtype.itemsize), dtype=torch.uint8)
