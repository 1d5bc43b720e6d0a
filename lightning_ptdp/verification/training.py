"""A training of the user's module in one layout, recorded."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_ptdp.pipeline.containers import as_names
from lightning_ptdp.pipeline.discover import find_blocks
from lightning_ptdp.verification.batches import Captured, Replay
from lightning_ptdp.verification.case import Case
from lightning_ptdp.verification.processes import run_ranks
from lightning_ptdp.verification.record import Record, Recorder, make_logger
from lightning_ptdp.verification.watch import StepWatch

__all__ = ["Subject"]

_LEFT_OUT = (
    "callbacks devices accumulate_grad_batches precision strategy num_nodes logger enable_checkpointing enable_progress_bar "
    "enable_model_summary default_root_dir profiler max_time fast_dev_run overfit_batches limit_train_batches limit_val_batches "
    "val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps reload_dataloaders_every_n_epochs barebones"
)
"""The Trainer's options that are ours, or do not change a step."""
_WRITERS = (
    "ExportHuggingFace LayoutSummary LogDatasets PipelineTimeline PredictionWriter RunReport SaveOnSignal SaveResolvedConfig StepProgress "
    "Throughput ValidateAtEnd WriteSamples"
)
_NEVER = 10**9


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Module, data and Trainer options to verify.

    Attributes:
        module: The LightningModule; trained in forked processes only.
        strategy: A strategy with the layout.
        datamodule: Its data, or None.
        train_dataloaders: Training data without a data module.
        val_dataloaders: Validation data without a data module.
        steps: Optimizer steps of a training.
        trainer: Arguments of the Trainer.
        folder: For records and logs.
        limit_s: Of one training, in seconds.
    """

    module: Any
    strategy: Any
    datamodule: Any
    train_dataloaders: Any
    val_dataloaders: Any
    steps: int
    trainer: Mapping[str, Any]
    folder: Path
    limit_s: float

    @property
    def accumulates(self) -> int:
        """Batches in a step of a replica."""
        count: int = self.trainer.get("accumulate_grad_batches") or 1
        return count

    def train(self, case: Case, replicas: Sequence[Captured] = ()) -> list[Record]:
        """Return the record of each rank.

        Raises:
            ValueError: The layout is refused.
            VerificationError: The training failed or was late.
        """
        folder = self.folder / f"{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        train = partial(self._train_here, case, replicas, folder)
        run_ranks(train, case.devices, name=case.name, log=folder / "log.txt", limit_s=self.limit_s)
        ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(case.devices)]
        for file in folder.glob("*.pt"):
            file.unlink()
        return ranks

    def _train_here(self, case: Case, replicas: Sequence[Captured], folder: Path) -> None:
        names, module = self.strategy._names, self.module
        warnings.filterwarnings("ignore")
        logging.disable(logging.INFO)
        os.environ["PL_GLOBAL_SEED"] = os.environ.get("PL_GLOBAL_SEED") or str(torch.initial_seed() % 2**32)
        torch.manual_seed(int(os.environ["PL_GLOBAL_SEED"]))
        if case.blocks is not None:
            _shorten(module, case)
        if case.frozen and not case.config.keyed_dropout:
            _switch_dropout_off(module)
        watch = StepWatch(module, frozen=case.frozen)
        kind = type("VerificationRecorder", (Recorder, names.Callback), {})
        recorder = kind(folder, steps=self.steps, watch=watch, captures=case.reads == "loader")
        trainer = names.Trainer(**self._options(case, recorder, names))
        train, validation, datamodule = self.train_dataloaders, self.val_dataloaders, self.datamodule
        if case.reads != "loader":
            train, validation = _replayed(trainer, replicas)
            if datamodule is not None:
                loaders = train, validation
                vars(datamodule).update(train_dataloader=lambda: loaders[0], val_dataloader=lambda: loaders[1])
                train = validation = None
        trainer.fit(module, train, validation, datamodule)

    def _options(self, case: Case, recorder: Any, names: Any) -> dict[str, Any]:
        given = {name: value for name, value in self.trainer.items() if name not in _LEFT_OUT.split()}
        callbacks = self.trainer.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        kept = [one for one in callbacks if not isinstance(one, names.Writers) and type(one).__name__ not in _WRITERS.split()]
        options = {each.name: getattr(case.config, each.name) for each in fields(case.config)} | {"start_method": "popen"}
        endless = {} if given.get("max_steps") or given.get("max_epochs") else {"max_epochs": -1}
        return {
            **given,
            **endless,
            "strategy": type(self.strategy)(**options),
            "devices": case.devices,
            "precision": case.precision or self.trainer.get("precision"),
            "accumulate_grad_batches": self.accumulates * case.accumulates,
            "callbacks": [recorder, *kept],
            "logger": make_logger(names.DummyLogger, recorder.log),
            "default_root_dir": str(self.folder),
            "limit_val_batches": self.steps,
            "val_check_interval": _NEVER,  # validated when the recorder ends the training
            "check_val_every_n_epoch": None,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }


def _replayed(trainer: Any, replicas: Sequence[Captured]) -> tuple[Any, Any]:
    """Return loaders of captured batches for training and validation."""
    first = replicas[0]
    train = Replay(trainer, [each.train for each in replicas], length=first.length)
    validation = [
        Replay(trainer, [[each.validation[index]] for each in replicas], length=len(loader), again=True)
        for index, loader in enumerate(first.validation)
    ]
    return train, validation


def _shorten(module: Any, case: Case) -> None:
    """Keep the first blocks only, also of what ``configure_model`` builds."""
    build = module.configure_model

    def built() -> None:
        build()
        plan = case.config.plan
        if plan is None and hasattr(module, "configure_parallel"):
            plan = module.configure_parallel()
        for name in as_names(plan.blocks) if plan is not None and plan.blocks is not None else find_blocks(module):
            members = module.get_submodule(name)._modules
            for key in list(members)[case.blocks :]:
                del members[key]

    if any(True for _ in module.parameters()):
        built()
    vars(module)["configure_model"] = built


def _switch_dropout_off(module: nn.Module) -> None:
    for child in module.modules():
        for name in ("p", "dropout"):
            if isinstance(vars(child).get(name), float):
                setattr(child, name, 0.0)
