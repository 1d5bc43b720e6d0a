"""Writer of a checkpoint folder, also from another checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from lightning_ptdp.base.checked_json import Json
from lightning_ptdp.checkpoint import data_files, files
from lightning_ptdp.checkpoint.files import check_apart
from lightning_ptdp.checkpoint.index import encode_index, verify_checkpoint
from lightning_ptdp.checkpoint.local_rectangles import (
    LocalRectangle,
    Tensors,
    cut_strips,
    rectangles_of,
)
from lightning_ptdp.checkpoint.metadata import (
    INDEX_FILE,
    METADATA_FILE,
    README_FILE,
    STATE_FILE,
    CheckpointMetadata,
    check_json,
    write_small,
)
from lightning_ptdp.checkpoint.reader import MODEL, TensorReader
from lightning_ptdp.checkpoint.remote_path import PathLike, Place, each
from lightning_ptdp.checkpoint.save_agreement import (
    CheckpointError,
    from_rank_zero,
    is_rank_zero,
    same_outcome,
)
from lightning_ptdp.checkpoint.save_folders import SaveFolders, new_save_name, pending_save
from lightning_ptdp.checkpoint.saved_state import STATE, TRAINING, encode_state, read_state
from lightning_ptdp.checkpoint.tagged_json import Encoded

README = """\
This folder is one checkpoint of the whole model, written by lightning-ptdp. Any number of ranks can read it. torch.load() reads only files.

    LitModel.load_from_checkpoint(FOLDER)          with lightning-ptdp installed; needs no process group and no particular strategy
    trainer.fit(model, ckpt_path=FOLDER)           with Trainer(strategy="ptdp"), in any layout
    ptdp ckpt inspect FOLDER                       show the content
    ptdp convert FOLDER one.ckpt --to lightning    Lightning's single file, for torch.load() and machines without lightning-ptdp
"""


def save_checkpoint(
    path: PathLike,
    *,
    tensors: Tensors,
    state: dict[str, Any],
    metadata: Mapping[str, Json],
    folders: SaveFolders | None = None,
) -> None:
    """Write a checkpoint folder; collective over the default process group, if there is one.

    All content is written under a temporary name beside ``path`` and renamed at the end, so that
    ``path`` always holds the complete old or the complete new checkpoint. It must be on a file
    system that all ranks share.

    Args:
        path: The folder to create. An existing checkpoint or file is replaced.
        tensors: This rank's local tensors under their global names
            (``"model/blocks.0.attn.qkv.weight"``). A rectangle that several ranks hold is written
            once. Together, the ranks must hold every element of every tensor.
        state: Further content of the checkpoint. Rank 0's is written. For its types see
            :func:`portable`.
        metadata: Facts about the run in JSON types, such as the layout. ``"aliases"``, if present,
            maps names of tied parameters to their stored names (both without ``model/``);
            :func:`read_full` returns both.
        folders: Record of the run's checkpoint folders; None: the run writes only this checkpoint.

    Raises:
        CheckpointError: A rank failed. Raised on every rank. The content of ``path`` is unchanged,
            and nothing else is left.
    """
    with same_outcome(doing(path)):
        rectangles = rectangles_of(tensors)
    write_checkpoint(path, rectangles=rectangles, state=state, metadata=metadata, folders=folders)


def write_checkpoint(
    path: PathLike,
    *,
    rectangles: Iterable[LocalRectangle],
    state: dict[str, Any],
    metadata: Mapping[str, Json],
    folders: SaveFolders | None = None,
    num_files: int = 1,
    created: float | None = None,
) -> None:
    """Write a checkpoint like :func:`save_checkpoint`, from rectangles.

    A single process may pass rectangles from any source, such as a memory-mapped file. Their values
    are read one rectangle after the other.

    Args:
        path: As for :func:`save_checkpoint`.
        rectangles: This rank's rectangles.
        state: As for :func:`save_checkpoint`.
        metadata: As for :func:`save_checkpoint`.
        folders: As for :func:`save_checkpoint`.
        num_files: Number of files that a rank writes, in as many threads.
        created: Time of another checkpoint that this one is a copy of; default: now.

    Raises:
        CheckpointError: As for :func:`save_checkpoint`.
    """
    content = checked_content(path, state=state, metadata=metadata)  # all ranks raise its error
    assignment = data_files.assign(
        cut_strips(chain(rectangles, state_rectangles(content))), doing=doing(path)
    )
    save_rectangles(
        files.absolute(path),
        assignment=assignment,
        content=content,
        metadata=metadata,
        folders=folders or SaveFolders(),
        num_files=num_files,
        created=created,
    )


def checked_content(
    path: PathLike,
    *,
    state: dict[str, Any],
    metadata: Mapping[str, Json],
    group: dist.ProcessGroup | None = None,
) -> Encoded:
    """Return the state of ``state.json`` on rank 0, and nothing elsewhere; collective.

    The ranks are those of ``group`` (None: the default group).

    Raises:
        CheckpointError: The state or the metadata cannot be stored, or ``path`` cannot be replaced.
            Raised on every rank.
    """
    content = Encoded(text=b"", tensors=[], is_plain=True)
    with same_outcome(doing(path), group):
        if is_rank_zero(group):
            # A file of the same name, such as Lightning's, may be replaced.
            files.check_replaceable(path, marker=METADATA_FILE, or_file=True)
            check_json(metadata)
            content = encode_state(state)
    return content


def state_rectangles(content: Encoded) -> Iterator[LocalRectangle]:
    """Yield the tensors of a checked state, which only rank 0 has."""
    for number, value in enumerate(content.tensors):
        yield LocalRectangle.full(f"{STATE}{number}", value)


def save_rectangles(
    target: Place,
    *,
    assignment: data_files.Assignment,
    content: Encoded,
    metadata: Mapping[str, Json],
    folders: SaveFolders,
    group: dist.ProcessGroup | None = None,
    num_files: int = 1,
    created: float | None = None,
) -> None:
    """Write the rectangles of an assignment, and a checked state.

    The function is collective over ``group`` (None: the default group), whose ranks share the file
    system of ``target``.

    Raises:
        CheckpointError: As for :func:`save_checkpoint`.
    """
    action = doing(target)
    save = pending_save(target, from_rank_zero(new_save_name, group))
    try:
        with same_outcome(action, group):
            if is_rank_zero(group):
                save.begin(folders)
        written = data_files.write_rectangles(
            save.part,
            assignment.rectangles,
            doing=action,
            group=group,
            num_files=num_files,
        )
        with same_outcome(action, group):
            if is_rank_zero(group):
                small = {
                    STATE_FILE: content.text,
                    README_FILE: README.encode(),
                    INDEX_FILE: encode_index(written.rectangles),
                }
                sent = each(target, lambda name: write_small(save.part / name, small[name]), small)
                if created is None:
                    created = folders.time_of_next(target.parent)
                save.commit(
                    CheckpointMetadata(
                        run=metadata,
                        tensors=assignment.tensors,
                        files={**written.entries, **dict(zip(small, sent, strict=True))},
                        created=created,
                    )
                )
                save.release()
    except CheckpointError:
        with same_outcome(f"cleaning up after {action}", group):
            if is_rank_zero(group):
                save.discard()
                save.release()
        raise
    finally:
        save.release()


def doing(path: PathLike) -> str:
    """Return the action for messages."""
    return f"saving the checkpoint {os.fspath(path)}"


# ---- Rewriting of a checkpoint: other number of files, other dtype, or without optimizer ---------


def reshard_checkpoint(
    source: PathLike,
    destination: PathLike,
    *,
    num_files: int = 1,
    dtype: torch.dtype | None = None,
    weights_only: bool = False,
) -> None:
    """Rewrite a checkpoint, tensor by tensor, in one process.

    Every layout can read every checkpoint without this. Rewrite a checkpoint to move, publish or
    read it as a few large files. The source is verified while it is read.

    Args:
        source: The checkpoint folder.
        destination: The folder to create. Another checkpoint there is replaced.
        num_files: Number of data files, written in as many threads.
        dtype: Dtype of the model's floating-point tensors; default: as stored. The optimizer's
            tensors are unchanged.
        weights_only: Leave out the optimizer and the schedulers. The checkpoint is smaller; a
            training can start from it but not continue.

    Raises:
        CheckpointError: The source is damaged, or an argument is invalid. Nothing is left at the
            destination.
    """
    if num_files < 1:
        raise CheckpointError(f"num_files={num_files} must be a positive integer")
    check_apart(destination, [source])
    verify_checkpoint(source)
    reader = TensorReader(source)
    state = {
        key: value
        for key, value in read_state(source, types="keep").items()
        if not (weights_only and key in TRAINING)
    }
    write_checkpoint(
        destination,
        rectangles=_rectangles(reader, dtype, weights_only),
        state=state,
        metadata=reader.metadata.run,
        num_files=num_files,
        created=reader.metadata.created,
    )


def _rectangles(
    reader: TensorReader, dtype: torch.dtype | None, weights_only: bool
) -> Iterator[LocalRectangle]:
    for name, entry in sorted(reader.tensors.items()):
        is_model = name.startswith(MODEL)
        if name.startswith(STATE) or (weights_only and not is_model):
            continue
        yield reader.on_disk(name, dtype if is_model and entry.dtype.is_floating_point else None)
