"""Callback that writes predictions as JSON lines.

One line per sample is written, in the order of the samples in any layout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

_PADDING = -1

Record = dict[str, object]


class PredictionWriter(Callback):
    """Callback that writes the results of ``predict_step`` as JSON lines.

    A result is a tensor, or a mapping of tensors, with one row per sample. If the module has a
    method ``summarize_predictions(outputs)``, its result is written instead.

    A line is ``{"sample": 7, "nll": 61.2, …}``. It contains the number of the sample if the loader
    has a method ``indices(step)``, as ``EvaluationLoader`` has. There -1 marks a row that only
    fills up its batch and is left out. Rank 0 gathers every batch from the other replicas and
    writes it at once. It therefore holds no more than a batch of all replicas.

    Args:
        file: Path of the file; None prints the lines.

    Raises:
        ValueError: (while predicting) ``predict_step`` returns something else.
    """

    def __init__(self, file: str | None = None) -> None:
        self._path = None if file is None else Path(file)
        self._out: TextIO | None = None
        self._written = 0

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the file."""
        self._written = 0
        if trainer.is_global_zero and self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._out = self._path.open("w", encoding="utf-8")

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Gather the replicas' rows and write them."""
        summarize = getattr(pl_module, "summarize_predictions", None)
        if callable(summarize):
            outputs = summarize(outputs)
        records = list(_records(outputs, _indices(trainer, batch_idx, dataloader_idx)))
        gathered = _from_all_replicas(trainer, records)
        if trainer.is_global_zero:
            out = self._out or sys.stdout
            for record in (row for replica in gathered for row in replica):
                out.write(json.dumps(record) + "\n")
                self._written += 1

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the file and print its path."""
        if self._out is not None:
            rank_zero_info(f"{self._written} predictions written to {self._path}")
        self._close()

    def on_exception(self, trainer: Trainer, *_: object) -> None:
        """Close the file, and keep the lines written so far."""
        self._close()

    def _close(self) -> None:
        if self._out is not None:
            self._out.close()
        elif sys.stdout is not None:
            sys.stdout.flush()
        self._out = None


def _indices(trainer: Trainer, batch_idx: int, dataloader_idx: int) -> list[int] | None:
    loader = trainer.predict_dataloaders
    if isinstance(loader, (list, tuple)):
        loader = loader[dataloader_idx]
    tell = getattr(loader, "indices", None)
    return list(tell(batch_idx)) if callable(tell) else None


def _records(outputs: object, indices: list[int] | None) -> Iterator[Record]:
    columns = {"prediction": outputs} if isinstance(outputs, Tensor) else outputs
    if not isinstance(columns, Mapping) or not all(
        isinstance(value, Tensor) and value.dim() for value in columns.values()
    ):
        raise ValueError(
            f"predict_step returned {_kind(outputs)}, but predictions can only be written from "
            "a tensor, or a mapping of tensors, with one row per sample. For other outputs, "
            "give the Trainer your own BasePredictionWriter"
        )
    lists = {str(name): value.detach().to("cpu").tolist() for name, value in columns.items()}
    for row, values in enumerate(zip(*lists.values(), strict=True)):
        record = dict(zip(lists, values, strict=True))
        if indices is None:
            yield record
        elif indices[row] != _PADDING:
            yield {"sample": indices[row], **record}


def _kind(outputs: object) -> str:
    if isinstance(outputs, Mapping):
        return "a mapping of " + ", ".join(
            sorted({type(value).__name__ for value in outputs.values()})
        )
    return "a " + type(outputs).__name__


def _from_all_replicas(trainer: Trainer, records: list[Record]) -> list[list[Record]]:
    """Gather the replicas' predictions on rank 0, in order; collective."""
    mesh = getattr(trainer.strategy, "mesh", None)
    group = None if mesh is None else mesh.group("replicas")
    ranks = range(trainer.world_size) if group is None else group.ranks
    if len(ranks) == 1:
        return [records]
    gathered: list[list[Record]] | None = (
        [[] for _ in ranks] if dist.get_rank() == ranks[0] else None
    )
    dist.gather_object(
        records, gathered, dst=ranks[0], group=None if group is None else group.handle
    )
    return gathered or []
