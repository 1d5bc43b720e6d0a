"""Rewriting of a checkpoint: other number of files, other dtype, or without optimizer."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError
from lightning_ptdp.checkpoint.checkpoint_verifier import verify_checkpoint
from lightning_ptdp.checkpoint.files import check_apart
from lightning_ptdp.checkpoint.local_rectangles import LocalRectangle
from lightning_ptdp.checkpoint.reader import MODEL, TensorReader
from lightning_ptdp.checkpoint.save import write_checkpoint
from lightning_ptdp.checkpoint.saved_state import STATE, read_state

__all__ = ["reshard_checkpoint"]

_TRAINING = ("optimizer_states", "lr_schedulers")


def reshard_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    num_files: int = 1,
    dtype: torch.dtype | None = None,
    weights_only: bool = False,
) -> None:
    """Rewrite a checkpoint, tensor by tensor, in one process.

    Any layout reads any checkpoint unchanged. Rewriting serves to move, publish or read a
    checkpoint as a few large files. The source is verified while it is read.

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
        if not (weights_only and key in _TRAINING)
    }
    rectangles = _rectangles(reader, dtype, weights_only)
    run, created = dict(reader.metadata.run), reader.metadata.created
    write_checkpoint(
        destination,
        rectangles=rectangles,
        state=state,
        metadata=run,
        num_files=num_files,
        created=created,
    )


def _rectangles(
    reader: TensorReader, dtype: torch.dtype | None, weights_only: bool
) -> Iterator[LocalRectangle]:
    for name, entry in sorted(reader.tensors.items()):
        is_model = name.startswith(MODEL)
        if name.startswith(STATE) or (weights_only and not is_model):
            continue
        yield reader.on_disk(name, dtype if is_model and entry.dtype.is_floating_point else None)
