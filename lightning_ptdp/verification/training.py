"""A training of the user's module in one layout, with changes that isolate a cause."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.base.forked_processes import Tell, run_ranks
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.pipeline.containers import as_names
from lightning_ptdp.pipeline.discover import find_blocks
from lightning_ptdp.verification.record import Captured, Record, Recorder, Replay
from lightning_ptdp.verification.watch import StepWatch
from lightning_ptdp.world.axes import AXES
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.rendezvous_address import LOOPBACK, reserved_port

_LEFT_OUT = (
    "num_nodes profiler max_time fast_dev_run overfit_batches limit_train_batches "
    "reload_dataloaders_every_n_epochs barebones"
)
"""Options of the Trainer that the verification ignores, because they do not change a step."""
_WRITERS = (
    "ExportHuggingFace Goodput LayoutSummary LogDatasets PipelineTimeline PredictionWriter "
    "RunReport SaveOnSignal SaveResolvedConfig StepProgress Throughput ValidateAtEnd WriteSamples"
)
_NEVER = 10**9
_BYTES = 16
"""Bytes of a parameter: its value, its gradient and two optimizer states, in float32."""
_SHOWN = 2000
"""Number of characters of a log that an error shows."""
_AXES = {
    "t": "tensor_parallel_size sequence_parallel tensor_overlap distribute_saved_activations",
    "p": "pipeline_parallel_size virtual_pipeline_size schedule partition microbatch_group_size "
    "scatter_gather channel_ctas",
    "c": "context_parallel_size context_parallel_attention",
    "e": "expert_parallel_size expert_tensor_parallel_size",
    "d": "shard reduce_dtype data_parallel_replicas inter_node_reduce_dtype "
    "overlap_parameter_gather bucket_mb",
    "m": "num_microbatches micro_batch_size",
    " ": "recompute recompute_layers",
}
"""Options by the axis that they belong to. All other options apply to one process too."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training.

    Attributes:
        name: Name in error messages.
        config: Options of the strategy.
        devices: Number of processes.
        batches: Batches that each replica reads; empty: the user's loaders are read.
        precision: Precision of the Trainer.
        frozen: True if random numbers are replaced by constants.
        blocks: Number of blocks to keep of each repeated container; None: all.
        disturbed: True if the initial weights are changed by about the rounding of float32.
    """

    name: str
    config: PTDPConfig
    devices: int
    batches: Sequence[Captured] = ()
    precision: Any = None
    frozen: bool = False
    blocks: int | None = None
    disturbed: bool = False

    @property
    def layout(self) -> ParallelLayout:
        """Return the layout on the devices."""
        return self.config.layout(self.devices)

    def only(self, axes: str, devices: int, batches: Sequence[Captured], **options: Any) -> Case:
        """Return the training with some axes of the layout ("": one process), on ``devices``."""
        for axis, names in _AXES.items():
            if axis not in axes:
                options = {name: getattr(PTDPConfig, name) for name in names.split()} | options
        return replace(
            self,
            name=f"{axes} alone" if axes else "one process",
            config=replace(self.config, **options),
            devices=devices,
            batches=batches,
        )


def smaller_layouts(
    case: Case, combined: Captured, *, microbatches: int
) -> Iterator[tuple[str, Case]]:
    """Yield (axes, training) with one axis of the layout at a time.

    Args:
        case: The full layout.
        combined: Batches of one process.
        microbatches: Number of microbatches in one batch of a replica.
    """
    layout = case.layout
    replicas = layout.num_replicas
    count = microbatches * replicas // combined.parts
    if microbatches > 1 or replicas > 1:
        yield (
            "m",
            case.only("m", 1, [combined], micro_batch_size=None, num_microbatches=max(count, 2)),
        )
    for axis in AXES:
        size = layout.size(axis.name)
        if axis.reads != "samples" and size > 1:
            options = {"num_microbatches": count} if axis.name == "pipeline" else {}
            yield axis.letter, case.only(axis.letter, size, [combined], **options)
    if replicas > 1:
        axes = "de" if layout.size("expert") > 1 else "d"
        yield axes, case.only(axes, replicas, case.batches)


# ---- Execution of a training ---------------------------------------------------------------------


class VerificationError(PTDPError, RuntimeError):
    """Failure of a verification's training, or difference between a layout and one process."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Module, data and Trainer options to verify.

    Attributes:
        module: The LightningModule, which is trained in forked processes only.
        strategy: A strategy with the layout.
        data: Training loaders, validation loaders and data module; each may be None.
        steps: Number of optimizer steps of a training.
        trainer: Arguments of the Trainer.
        folder: Folder of records and logs.
        limit_s: Time limit of one training, in seconds.
    """

    module: Any
    strategy: Any
    data: tuple[Any, Any, Any]
    steps: int
    trainer: Mapping[str, Any]
    folder: Path
    limit_s: float

    def train(self, case: Case) -> list[Record]:
        """Return the record of each rank.

        Raises:
            VerificationError: The training failed, was refused, or exceeded its time limit.
        """
        self._run(self._train_rank, case.devices, case, name=f"training {case.name}")
        return [
            torch.load(self.folder / f"{rank}.pt", weights_only=False)
            for rank in range(case.devices)
        ]

    def fits_one_process(self) -> bool:
        """Return True if one process can hold the full model."""
        return bool(self._run(self._measure, 1, name="measuring the model")[0])

    def _run(
        self, function: Callable[..., object], count: int, *args: object, name: str
    ) -> dict[int, Any]:
        """Return the results of ``function(rank, *args)`` in forked processes.

        The processes are Lightning's ranks.
        """

        def call(rank: int, tell: Tell) -> object:
            tell(name)
            vars(sys).pop("ps1", None)  # The forked process is not interactive.
            with open(self.folder / f"{rank}.txt", "wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            if count > 1:
                os.environ.update(
                    LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR=LOOPBACK, MASTER_PORT=str(port)
                )
            torch.set_num_threads(1)  # The parent's OpenMP threads do not exist in this process.
            try:
                return function(rank, *args)
            except Exception:
                traceback.print_exc()
                raise

        with reserved_port() as port:
            outcome = run_ranks(call, count=count, timeout_s=self.limit_s)
        if problem := outcome.explain():
            suffix = "" if outcome.errors else f" after limit_s={self.limit_s:g}"
            error = VerificationError(f"{problem}{suffix}")
            log = self.folder / f"{next(iter(outcome.errors or outcome.late))}.txt"
            log.touch()
            error.add_note(log.read_text(errors="replace")[-_SHOWN:])
            raise error
        return outcome.results

    def _measure(self, rank: int) -> bool:
        # A model whose ``configure_model`` reads weights is assumed to fit.
        with torch.device("meta"), suppress(Exception):
            self.module.configure_model()
        needed = _BYTES * sum(parameter.numel() for parameter in self.module.parameters())
        available = psutil.virtual_memory().available
        if self.trainer.get("accelerator", "auto") != "cpu" and torch.cuda.is_available():
            available = min(available, torch.cuda.mem_get_info()[0])
        return needed <= available

    def _train_rank(self, rank: int, case: Case) -> None:
        names = self.strategy._names
        module = self.module
        warnings.filterwarnings("ignore")
        os.environ.setdefault("PL_GLOBAL_SEED", str(torch.initial_seed() % 2**32))
        if case.blocks is not None:
            _shorten(module, case)
        kind = type("VerificationRecorder", (Recorder, names.Callback), {})
        record = Record()
        StepWatch(module, record, frozen=case.frozen)
        recorder = kind(record, self.steps, captures=not case.batches, disturbed=case.disturbed)
        trainer = names.Trainer(**self._options(case, recorder))
        train, validation, datamodule = self.data
        if case.batches:
            captured = case.batches[case.layout.replica(rank)]
            lists = captured.lists
            train = Replay(lambda: lists.get(("train", trainer.current_epoch), ()), captured.length)
            validation = [
                Replay(partial(lists.__getitem__, key), len(lists[key]))
                for key in lists
                if key[0] == "validation"
            ]
            if datamodule is not None:
                vars(datamodule).update(
                    train_dataloader=lambda loader=train: loader,
                    val_dataloader=lambda loader=validation: loader,
                )
                train = validation = None
        trainer.fit(module, train, validation, datamodule)
        torch.save(record, self.folder / f"{rank}.pt")

    def _options(self, case: Case, recorder: Any) -> dict[str, Any]:
        names = self.strategy._names
        options = {
            name: value for name, value in self.trainer.items() if name not in _LEFT_OUT.split()
        }
        callbacks = options.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        user_callbacks = [
            callback
            for callback in callbacks
            if not isinstance(callback, names.Writers)
            and type(callback).__name__ not in _WRITERS.split()
        ]
        parts = case.batches[0].parts if case.batches else 1
        logger = names.DummyLogger()
        vars(logger)["log_metrics"] = recorder.log
        return options | {
            "strategy": type(self.strategy)(**vars(case.config) | {"start_method": "popen"}),
            "devices": case.devices,
            "max_epochs": options.get("max_epochs") or -1,
            "precision": case.precision or options.get("precision"),
            "accumulate_grad_batches": parts * (options.get("accumulate_grad_batches") or 1),
            "callbacks": [recorder, *user_callbacks],
            "logger": logger,
            "default_root_dir": str(self.folder),
            "limit_val_batches": self.steps,
            # The Trainer validates when the recorder ends the training.
            "val_check_interval": _NEVER,
            "check_val_every_n_epoch": None,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }


def _shorten(module: Any, case: Case) -> None:
    """Keep the first blocks only, also of modules that ``configure_model`` builds."""
    build = module.configure_model

    def built() -> None:
        build()
        plan = case.config.plan
        if plan is None and hasattr(module, "configure_parallel"):
            plan = module.configure_parallel()
        blocks = getattr(plan, "blocks", None)
        for name in as_names(blocks) if blocks else find_blocks(module):
            members = module.get_submodule(name)._modules
            for key in list(members)[case.blocks :]:
                del members[key]

    if list(module.parameters()):
        built()
    vars(module)["configure_model"] = built
