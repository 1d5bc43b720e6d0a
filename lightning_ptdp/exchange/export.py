"""Hugging Face folders from a checkpoint, or from the model that is trained: one writer, two
sources of rectangles."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lightning_ptdp.checkpoint import (
    CheckpointError,
    LocalRectangle,
    TensorEntry,
    TensorReader,
    files,
    read_state,
    same_outcome,
)
from lightning_ptdp.checkpoint.rectangle_owners import Held, check_held, share_out
from lightning_ptdp.checkpoint.save_agreement import from_rank_zero, gather, is_rank_zero, own_rank
from lightning_ptdp.exchange.architecture import verify_huggingface
from lightning_ptdp.exchange.export_content import (
    MODEL,
    Described,
    described_by_folder,
    described_by_state,
)
from lightning_ptdp.exchange.export_writer import FolderPlan
from lightning_ptdp.exchange.state_dict_files import as_folder, common_prefix

__all__ = ["SHARD_BYTES", "FolderExport", "to_huggingface", "verify_export"]

SHARD_BYTES = 5_000_000_000


def to_huggingface(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    prefix: str | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder from a checkpoint of ours, of any layout; in one process.

    Args:
        source: The checkpoint folder.
        destination: The folder to make; an earlier export there is replaced.
        config: For a LightningModule that wraps a Hugging Face model, that model's ``config.json``,
            or the folder it is in. It follows from the checkpoint for our own models, and where the
            hyperparameters have the folder as ``path`` (``LitCausalLM``). The files of the
            tokenizer and of generation beside it go along, or for a GPT of ours the tokenizer of
            the data folder that the checkpoint names, as transformers reads it.
        prefix: Name of the model's attribute in the LightningModule, with a dot; tensors of other
            names are left out. Default: what all names begin with.
        dtype: What floating-point tensors are converted to; default: as they are.
        shard_bytes: Most bytes of tensors in one file.

    Raises:
        CheckpointError: The checkpoint is damaged, or holds a model that Hugging Face does not
            have; nothing is left at ``destination``.
    """
    reader, target = TensorReader(source), Path(os.path.abspath(destination))
    entries = {name: entry for name, entry in reader.tensors.items() if name.startswith(MODEL)}
    described = _described(source, config)
    items = described.items(entries, prefix=prefix, dtype=dtype, source=str(source))
    plan = FolderPlan.of(items, shard_bytes=shard_bytes)
    files.check_replaceable(target, marker=files.EXPORT_MARK)
    with files.replacing(target) as part:
        plan.create(part, described.files(items))
        plan.fill(part, (_stored(reader, name, entry) for name, entry in entries.items()))
        files.sync_folder(part)


def verify_export(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    prefix: str | None = None,
) -> str:
    """Return the result of ``verify_huggingface`` for a folder that ``to_huggingface`` made with
    the same arguments.

    Raises:
        CheckpointError: The folder does not give what the checkpoint gives.
    """
    with as_folder(source, beside=folder) as stored:
        if prefix is None:
            prefix = common_prefix(
                {name.removeprefix(MODEL) for name in TensorReader(stored).metadata.names(MODEL)}
            )
        return verify_huggingface(
            stored, folder, prefix=prefix, model=_described(stored, config).ours
        )


@dataclass(frozen=True, kw_only=True)
class FolderExport:
    """A Hugging Face folder that all ranks write together, each what it has; collective over all
    ranks.

    Args:
        target: The folder to make, the same on all ranks and on a file system that they share.
        described: What is exported.
        prefix: As of ``to_huggingface``.
        dtype: Likewise.
        shard_bytes: Likewise.
    """

    target: Path
    described: Described
    prefix: str | None = None
    dtype: torch.dtype | None = None
    shard_bytes: int = SHARD_BYTES

    def check(self, rectangles: Sequence[LocalRectangle]) -> None:
        """Find out before training whether the folder could be written after it.

        Args:
            rectangles: What this rank has.

        Raises:
            CheckpointError: On all ranks: the model is none that Hugging Face has, its names are
                others, the folder has other content, cannot be made, or the disk has not the room.
        """
        plan, _ = self._plan(rectangles)
        with same_outcome(self._doing):
            if is_rank_zero():
                files.check_replaceable(self.target, marker=files.EXPORT_MARK)
                self.target.parent.mkdir(parents=True, exist_ok=True)
                probe = files.part_name(self.target)
                probe.mkdir()
                probe.rmdir()
                if (free := shutil.disk_usage(self.target.parent).free) < plan.num_bytes:
                    raise CheckpointError(
                        f"{self.target} will have {plan.num_bytes / 1e6:,.1f} MB, but its disk "
                        f"has {free / 1e6:,.1f} MB left"
                    )

    def write(self, rectangles: Sequence[LocalRectangle]) -> None:
        """Write the folder: it stands under its name when it is whole.

        Args:
            rectangles: What this rank has; what several have is written by one of them.

        Raises:
            CheckpointError: On all ranks, if anything failed on any; what was at ``target`` is
                untouched, nothing else is left.
        """
        plan, mine = self._plan(rectangles)
        part = from_rank_zero(lambda: files.part_name(self.target))
        try:
            with same_outcome(self._doing):
                if is_rank_zero():
                    files.check_replaceable(self.target, marker=files.EXPORT_MARK)
                    self.target.parent.mkdir(parents=True, exist_ok=True)
                    plan.create(part, self.described.files(plan.items))
            with same_outcome(self._doing):
                plan.fill(part, mine)
            with same_outcome(self._doing):
                if is_rank_zero():
                    files.sync_folder(part)
                    files.replace(part, self.target)
        finally:
            if is_rank_zero():
                files.remove(part)

    @property
    def _doing(self) -> str:
        return f"exporting {self.target}"

    def _plan(
        self, rectangles: Sequence[LocalRectangle]
    ) -> tuple[FolderPlan, list[LocalRectangle]]:
        """Return the plan of the folder, and the rectangles that this rank writes."""
        ranks = gather([Held.of(one) for one in rectangles])
        with same_outcome(self._doing):
            entries = check_held(ranks, "to export")
            items = {}
            if is_rank_zero():
                items = self.described.items(
                    entries, prefix=self.prefix, dtype=self.dtype, source="the module"
                )
        items = from_rank_zero(lambda: items)
        with same_outcome(self._doing):
            plan = FolderPlan.of(items, shard_bytes=self.shard_bytes)
        mine = share_out(ranks)[own_rank()]
        return plan, [one for one in rectangles if (one.name, one.place) in mine]


def _described(source: str | os.PathLike[str], config: str | os.PathLike[str] | None) -> Described:
    return (
        described_by_state(read_state(source))
        if config is None
        else described_by_folder(Path(config))
    )


def _stored(reader: TensorReader, name: str, entry: TensorEntry) -> LocalRectangle:
    """A tensor of a checkpoint, read when it is written."""
    whole = LocalRectangle.whole(name, torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
    return replace(whole, read=lambda offset, shape: reader.read(name, offset=offset, shape=shape))
