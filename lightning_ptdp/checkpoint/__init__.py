"""Checkpoints that are independent of the layout.

A checkpoint is Lightning's single file if one rank holds the whole model (single_file.py), else a
folder. A folder stores tensors as rectangles of the full, single-process tensors under global
names, so that any layout can read a checkpoint of any other layout. The data files are safetensors.
All other content is in small files::

    last.ckpt/
      metadata.json          format, layout, package versions, shape and dtype of every tensor,
                             size and sha256 of the files
      index.json             file and position of every rectangle
      state.json             loops, callbacks, schedulers, hyperparameters
      README.txt             instructions for reading this folder
      rank0-0.safetensors …  the rectangles, one file or more per rank
      rank0-0.crc …          checksums of their blocks

A folder appears under its name only when it is complete. An error on one rank is the same error on
every rank.
"""

from lightning_ptdp.checkpoint.background import BackgroundSaver
from lightning_ptdp.checkpoint.files import local_path
from lightning_ptdp.checkpoint.index import verify_checkpoint
from lightning_ptdp.checkpoint.latest import (
    OnDamage,
    choose_checkpoint,
    complete_checkpoints,
    mark_latest,
)
from lightning_ptdp.checkpoint.local_rectangles import LocalRectangle, rectangles_of
from lightning_ptdp.checkpoint.memory_folders import newest_checkpoint
from lightning_ptdp.checkpoint.metadata import (
    CheckpointMetadata,
    FileEntry,
    TensorEntry,
    read_metadata,
)
from lightning_ptdp.checkpoint.optimizer import (
    keeps_history,
    load_history,
    load_indexed_optimizer,
    load_optimizer,
    merge_groups,
    optimizer_groups,
    optimizer_history,
    optimizer_tensors,
)
from lightning_ptdp.checkpoint.reader import InMemory, Stored, TensorReader, load_tensors
from lightning_ptdp.checkpoint.save import reshard_checkpoint, save_checkpoint, write_checkpoint
from lightning_ptdp.checkpoint.save_agreement import (
    CheckpointError,
    MissingCheckpointError,
    reading,
    same_outcome,
)
from lightning_ptdp.checkpoint.save_folders import SaveFolders
from lightning_ptdp.checkpoint.saved_state import left_out, read_state
from lightning_ptdp.checkpoint.single_file import (
    PARAMETER_NAMES,
    TYPES,
    StoredOptimizers,
    StoredWeights,
    is_checkpoint,
    read_full,
    read_whole,
    to_lightning_file,
    with_types,
    write_file,
)
from lightning_ptdp.checkpoint.tagged_json import portable

__all__ = [
    "PARAMETER_NAMES",
    "TYPES",
    "BackgroundSaver",
    "CheckpointError",
    "CheckpointMetadata",
    "FileEntry",
    "InMemory",
    "LocalRectangle",
    "MissingCheckpointError",
    "OnDamage",
    "SaveFolders",
    "Stored",
    "StoredOptimizers",
    "StoredWeights",
    "TensorEntry",
    "TensorReader",
    "choose_checkpoint",
    "complete_checkpoints",
    "is_checkpoint",
    "keeps_history",
    "left_out",
    "load_history",
    "load_indexed_optimizer",
    "load_optimizer",
    "load_tensors",
    "local_path",
    "mark_latest",
    "merge_groups",
    "newest_checkpoint",
    "optimizer_groups",
    "optimizer_history",
    "optimizer_tensors",
    "portable",
    "read_full",
    "read_metadata",
    "read_state",
    "read_whole",
    "reading",
    "rectangles_of",
    "reshard_checkpoint",
    "same_outcome",
    "save_checkpoint",
    "to_lightning_file",
    "verify_checkpoint",
    "with_types",
    "write_checkpoint",
    "write_file",
]
