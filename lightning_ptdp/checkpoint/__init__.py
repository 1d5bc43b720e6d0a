"""Checkpoints that belong to the model and not to the layout, through torch's Distributed Checkpoint (DCP).

A checkpoint is a folder. Tensors are stored as rectangles of the full, single-process tensors under global names, so that any
layout reads what any other wrote; everything else is one small file each::

    last.ckpt/
      metadata.json    format, layout, package versions, shape and dtype of every tensor, size and sha256 of the files
      state.pt         loops, callbacks, schedulers, hyperparameters: ``torch.load(..., weights_only=True)`` reads it
      .metadata        DCP's index: which rectangle is in which file
      __0_0.distcp …   the rectangles

A folder appears under its name complete or not at all, and an error on one rank is the same error on every rank.
"""

from lightning_ptdp.checkpoint.agreement import same_outcome
from lightning_ptdp.checkpoint.boxes import Placed
from lightning_ptdp.checkpoint.convert import read_full, to_lightning_file
from lightning_ptdp.checkpoint.errors import CheckpointError
from lightning_ptdp.checkpoint.load import load_tensors
from lightning_ptdp.checkpoint.metadata import CheckpointMetadata, FileEntry, TensorEntry, read_metadata
from lightning_ptdp.checkpoint.optimizer import load_optimizer, merge_groups, optimizer_groups, optimizer_tensors
from lightning_ptdp.checkpoint.save import save_checkpoint
from lightning_ptdp.checkpoint.state import portable, read_state

__all__ = [
    "CheckpointError",
    "CheckpointMetadata",
    "FileEntry",
    "Placed",
    "TensorEntry",
    "load_optimizer",
    "load_tensors",
    "merge_groups",
    "optimizer_groups",
    "optimizer_tensors",
    "portable",
    "read_full",
    "read_metadata",
    "read_state",
    "same_outcome",
    "save_checkpoint",
    "to_lightning_file",
]
