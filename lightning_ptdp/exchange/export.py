"""Hugging Face folders from a checkpoint, or from the model in training.

Both sources provide rectangles of tensors to the same writer.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_ptdp.checkpoint import (
    CheckpointError,
    LocalRectangle,
    TensorReader,
    files,
    read_state,
    same_outcome,
)
from lightning_ptdp.checkpoint.local_copies import readable
from lightning_ptdp.checkpoint.local_rectangles import Held, check_held, choose_writers
from lightning_ptdp.checkpoint.remote_path import PathLike
from lightning_ptdp.checkpoint.save_agreement import from_rank_zero, gather, is_rank_zero, own_rank
from lightning_ptdp.checkpoint.write_locks import WriteLock
from lightning_ptdp.exchange.architecture import verify_huggingface
from lightning_ptdp.exchange.export_content import (
    MODEL,
    Described,
    described_by_folder,
    described_by_state,
)
from lightning_ptdp.exchange.export_writer import FolderPlan
from lightning_ptdp.exchange.state_dict_files import as_folder, common_prefix

SHARD_BYTES = 5_000_000_000


def to_huggingface(
    source: PathLike,
    destination: PathLike,
    *,
    config: PathLike | None = None,
    prefix: str | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder from a checkpoint of any layout, in one process.

    Args:
        source: The checkpoint folder.
        destination: The folder to create. An earlier export there is replaced.
        config: For a LightningModule that wraps a Hugging Face model: that model's ``config.json``,
            or the folder that contains it. Not needed for native models, nor if the hyperparameters
            name the folder as ``path`` (``LitCausalLM``). The tokenizer's files and
            ``generation_config.json`` beside it are copied. For a native GPT, the tokenizer of the
            data folder that the checkpoint names is written in transformers' format.
        prefix: Attribute of the model in the LightningModule, with a dot. Tensors without this
            prefix are left out. Default: the common prefix of all names.
        dtype: Dtype of the written floating-point tensors; default: as stored.
        shard_bytes: Maximum number of bytes of tensors in one file.

    Raises:
        CheckpointError: The checkpoint is damaged, or Hugging Face does not have its model. Nothing
            is left at ``destination``.
    """
    reader = TensorReader(source)
    target = files.local_path(destination)
    entries = {name: entry for name, entry in reader.tensors.items() if name.startswith(MODEL)}
    described = _described(source, config)
    items = described.items(entries, prefix=prefix, dtype=dtype, source=str(source))
    plan = FolderPlan.of(items, shard_bytes=shard_bytes)
    files.check_replaceable(target, marker=files.EXPORT_MARK)
    with files.replacing(target) as part:
        plan.create(part, described.files(items))
        plan.fill(part, map(reader.on_disk, entries))


def verify_export(
    source: PathLike,
    folder: PathLike,
    *,
    config: PathLike | None = None,
    prefix: str | None = None,
) -> str:
    """Verify a folder that ``to_huggingface`` wrote with the same arguments.

    Returns:
        The result of ``verify_huggingface``, in words.

    Raises:
        CheckpointError: The folder and the checkpoint differ.
    """
    folder = files.local_path(folder)
    with as_folder(source, target=folder) as stored:
        if prefix is None:
            prefix = common_prefix(
                {name.removeprefix(MODEL) for name in TensorReader(stored).metadata.names(MODEL)}
            )
        return verify_huggingface(
            stored, folder, prefix=prefix, model=_described(stored, config).ours
        )


@dataclass(frozen=True, kw_only=True)
class FolderExport:
    """A Hugging Face folder that all ranks write together, each its own part.

    The methods are collective over all ranks.

    Args:
        target: The folder to create: the same on all ranks, and on a shared file system.
        described: Description of the model to export.
        prefix: See ``to_huggingface``.
        dtype: See ``to_huggingface``.
        shard_bytes: See ``to_huggingface``.
    """

    target: Path
    described: Described
    prefix: str | None = None
    dtype: torch.dtype | None = None
    shard_bytes: int = SHARD_BYTES

    def check(self, rectangles: Sequence[LocalRectangle]) -> None:
        """Check before training that the folder can be written after it.

        Args:
            rectangles: This rank's rectangles.

        Raises:
            CheckpointError: Hugging Face does not have the model, its names differ, the folder has
                other content or cannot be created, or the disk is too full. Raised on all ranks.
        """
        plan, _ = self._plan(rectangles)
        with same_outcome(self._doing):
            if is_rank_zero():
                self._make_room()
                probe = files.part_name(self.target)
                probe.mkdir()
                probe.rmdir()
                if (free := shutil.disk_usage(self.target.parent).free) < plan.num_bytes:
                    raise CheckpointError(
                        f"{self.target} needs {plan.num_bytes / 1e6:,.1f} MB, but its "
                        f"disk has only {free / 1e6:,.1f} MB left"
                    )

    def write(self, rectangles: Sequence[LocalRectangle]) -> None:
        """Write the folder. It appears under its name when it is complete.

        Args:
            rectangles: This rank's rectangles. One rank writes each rectangle that several ranks
                hold.

        Raises:
            CheckpointError: A rank failed. Raised on all ranks. The content of ``target`` is
                unchanged, and nothing else is left.
        """
        plan, own_rectangles = self._plan(rectangles)
        part = from_rank_zero(lambda: files.part_name(self.target))
        lock = WriteLock(part)  # only rank 0 takes it
        try:
            with same_outcome(self._doing):
                if is_rank_zero():
                    self._make_room()
                    lock.take()
                    plan.create(part, self.described.files(plan.items))
            with same_outcome(self._doing):
                plan.fill(part, own_rectangles)
            with same_outcome(self._doing):
                if is_rank_zero():
                    files.sync(part)
                    files.replace(part, self.target)
        finally:
            if is_rank_zero():
                files.remove(part)
            lock.release()

    def _make_room(self) -> None:
        files.check_replaceable(self.target, marker=files.EXPORT_MARK)
        self.target.parent.mkdir(parents=True, exist_ok=True)

    @property
    def _doing(self) -> str:
        return f"exporting {self.target}"

    def _plan(
        self, rectangles: Sequence[LocalRectangle]
    ) -> tuple[FolderPlan, list[LocalRectangle]]:
        """Return the plan of the folder, and the rectangles that this rank writes."""
        held = gather([Held.of(rectangle) for rectangle in rectangles])
        with same_outcome(self._doing):
            entries = check_held(held, "to export")
            items = {}
            if is_rank_zero():
                items = self.described.items(
                    entries, prefix=self.prefix, dtype=self.dtype, source="the module"
                )
        items = from_rank_zero(lambda: items)
        with same_outcome(self._doing):
            plan = FolderPlan.of(items, shard_bytes=self.shard_bytes)
        assigned = choose_writers(held)[own_rank()]
        return plan, [
            rectangle for rectangle in rectangles if (rectangle.name, rectangle.place) in assigned
        ]


def _described(source: PathLike, config: PathLike | None) -> Described:
    if config is None:
        return described_by_state(read_state(source))
    return described_by_folder(Path(readable(config)))
