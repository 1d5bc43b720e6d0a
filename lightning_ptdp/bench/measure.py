"""Measurement of the steps of an ordinary fit, next to the prediction of the planner."""

from __future__ import annotations

import gc
import itertools
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ptdp.base.nested import iterate_tensors
from lightning_ptdp.bench.result import BenchResult
from lightning_ptdp.callbacks.pipeline_timeline import has_pipeline
from lightning_ptdp.callbacks.step_metrics import (
    batch_shape,
    device_name,
    flops_per_sample,
    replicas,
)
from lightning_ptdp.checkpoint.save_agreement import gather
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.parameters.structure_copies import without_tensors
from lightning_ptdp.pipeline.action_recorder import ActionRecorder
from lightning_ptdp.planner import (
    device_here,
    figures_source,
    fullest_rank,
    known_peak_flops,
    simulated_step_time,
    step_time,
)
from lightning_ptdp.schedule import ideal_bubble
from lightning_ptdp.schedule.simulate import Timeline
from lightning_ptdp.strategy.checks.model import full_model
from lightning_ptdp.strategy.planning import described_choice, described_job


class StepTimes(Callback):
    """Callback that measures optimizer steps and ends the fit.

    Global rank 0 writes a ``BenchResult``. Time runs from the end of one step to the end of the
    next. On a GPU each end waits for the device. After the measured steps one more step is
    recorded: with a pipeline for its bubble, and on a CPU for the peak memory of its tensors.

    Args:
        warmup: Steps before the measured ones.
        steps: Steps that are measured.
        file: File of the result.
        peak_flops: Peak operations per second of one device; None: the figure of the data sheet, if
            the device is known.
    """

    def __init__(
        self, *, warmup: int, steps: int, file: Path, peak_flops: float | None = None
    ) -> None:
        if warmup < 1:
            raise ValueError(
                f"warmup={warmup} must be at least 1, because the end of a step begins the next"
            )
        self._warmup = warmup
        self._steps = steps
        self._file = file
        self._peak_flops = peak_flops
        self._ends: list[float] = []
        self._recorder: ActionRecorder | None = None
        self._counted: CountedMemory | None = None
        self._timeline: Timeline | None = None
        self._shape = (0, 0)
        self._full_model: nn.Module | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep the structure of the whole model, because the measured model may be a part."""
        config = getattr(trainer.strategy, "config", None)
        if isinstance(config, PTDPConfig):
            self._full_model = without_tensors(full_model(pl_module, config))

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        """Start to record after the measured steps."""
        if not self._measured or self._recorder is not None:
            return
        device = trainer.strategy.root_device
        if has_pipeline(trainer):
            self._recorder = ActionRecorder(device)
            trainer.strategy.observers.add(self._recorder)
        if device.type == "cpu" and self._counted is None:
            self._counted = CountedMemory().__enter__()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Record the time; after the last step, gather the records and stop."""
        if trainer.global_step <= len(self._ends):
            return  # gradients are being accumulated
        on_gpu = trainer.strategy.root_device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        self._ends.append(time.perf_counter())
        if len(self._ends) == self._warmup and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        recorded = self._recorder is not None or self._counted is not None
        if self._counted is not None:
            self._counted.__exit__(None, None, None)
        if self._recorder is not None:
            trainer.strategy.observers.remove(self._recorder)
            self._timeline = self._recorder.gather(trainer.strategy.mesh.group("pipeline"))
        if recorded or (on_gpu and self._measured and not has_pipeline(trainer)):
            self._shape = batch_shape(batch)
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the result."""
        device = trainer.strategy.root_device
        counted = 0 if self._counted is None else self._counted.peak_bytes
        peaks = gather(
            torch.cuda.max_memory_allocated(device) if device.type == "cuda" else counted
        )
        if trainer.is_global_zero:
            self._result(trainer, pl_module, peaks).write(self._file)

    @property
    def _measured(self) -> bool:
        return len(self._ends) >= self._warmup + self._steps

    def _result(self, trainer: Trainer, module: LightningModule, peaks: list[int]) -> BenchResult:
        ends = self._ends[self._warmup - 1 : self._warmup + self._steps]
        rows, length = self._shape
        samples = rows * replicas(trainer) * trainer.accumulate_grad_batches
        device = device_name(trainer.strategy.root_device)
        precision = str(trainer.precision)
        measured = self._timeline
        layout = getattr(trainer.strategy, "layout", None)
        return BenchResult(
            layout=type(trainer.strategy).__name__ if layout is None else layout.describe(),
            device=device,
            precision=precision,
            world_size=trainer.world_size,
            samples=samples,
            num_microbatches=1 if layout is None else trainer.strategy.config.microbatches(rows),
            tokens=samples * length,
            flops=samples * flops_per_sample(module, length),
            seconds=tuple(after - before for before, after in itertools.pairwise(ends)),
            peak_memory_bytes=tuple(peaks),
            peak_flops=self._peak_flops or known_peak_flops(device, precision),
            bubble=None if measured is None else float(measured.bubble_fraction),
            ideal_bubble=None if measured is None else ideal_bubble(measured.schedule),
            **predicted(trainer, self._full_model, samples=samples, length=length),
        )


# ---- Peak memory of tensors on a CPU, counted ----------------------------------------------------
#
# The peak of the process would include the interpreter, the libraries and memory that the C library
# keeps.


_LEAST = 1024


class CountedMemory(TorchDispatchMode):
    """Context that counts the memory of living tensors after each operation.

    ``peak_bytes`` is the largest count. Tensors of less than 1 KiB are left out. torch's profiler
    is not used, because it does not see tensors freed by threads that communicate."""

    def __init__(self) -> None:
        super().__init__()
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}
        self._held = self.peak_bytes = 0

    def __enter__(self) -> CountedMemory:
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # isinstance accesses lazy attributes of modules
            tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
        self._see(tensors)
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the operation's result, and count its tensors."""
        result = func(*args, **(kwargs or {}))
        self._see(iterate_tensors(result))
        return result

    def _see(self, tensors: Any) -> None:
        for tensor in tensors:
            if (
                tensor.layout != torch.strided
                # not of the tensor: one without data, of the planner's traces, names a CPU
                or tensor.untyped_storage().device.type != "cpu"
                or (nbytes := tensor.untyped_storage().nbytes()) < _LEAST
            ):
                continue
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference.cdata not in self._there:
                self._there[reference.cdata] = reference, nbytes
                self._held += nbytes
        if self._held > self.peak_bytes:  # only then do freed tensors matter
            for key in [key for key, (storage, _) in self._there.items() if storage.expired()]:
                self._held -= self._there.pop(key)[1]
            self.peak_bytes = max(self.peak_bytes, self._held)


# ---- Planner's prediction for a step that is measured --------------------------------------------


def predicted(
    trainer: Trainer, module: nn.Module | None, *, samples: int, length: int
) -> dict[str, Any]:
    """Return the ``predicted_`` fields of a result, or nothing if the planner cannot predict.

    Args:
        trainer: Trainer with its strategy.
        module: The trained model before it was cut; None if it is not known.
        samples: Samples of a step, over all replicas.
        length: Tokens of a sample.
    """
    strategy = trainer.strategy
    accumulated = trainer.accumulate_grad_batches
    device = device_here(device_name(strategy.root_device))
    layout = getattr(strategy, "layout", None)
    if module is None or device is None or layout is None:
        return {}
    config = strategy.config
    rows = samples // layout.num_replicas // accumulated
    microbatches = config.microbatches(rows)
    try:
        job = described_job(
            module,
            config,
            world_size=layout.world_size,
            batch=samples // accumulated,
            device=device,
            length=length or None,
            precision=str(trainer.precision),
        )
        choice = described_choice(
            config,
            layout,
            micro_batch_size=max(1, rows // microbatches),
            num_microbatches=microbatches,
        )
        timed = simulated_step_time if layout.size("pipeline") > 1 else step_time
        memory = fullest_rank(job, choice)
        return {
            "predicted_s": timed(job, choice).total * accumulated,
            "predicted_bytes": memory.total - memory.communicators,
            "predicted_by": figures_source(device, job.processes),
        }
    except (ValueError, KeyError):  # the planner does not know the precision or the schedule
        return {}
