"""Callback that logs throughput: samples, tokens and model operations per second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ptdp.base.nested import iterate_tensors
from lightning_ptdp.base.option_types import Size, check_arguments
from lightning_ptdp.planner import known_peak_flops

__all__ = ["Throughput", "batch_shape", "device_name", "flops_per_sample", "replicas"]


class Throughput(Callback):
    """Callback that logs the throughput over all devices, as the mean over the last steps.

    The metrics are ``samples_per_s``, ``tokens_per_s``, ``model_tflops_per_s`` and ``mfu``. Time
    runs from the end of one step to the end of the next, so that data loading is included. The
    first step and validation are excluded. The first three metrics are totals over the replicas.
    Tokens are counted if the batch holds token ids: ``input_ids`` (b, s), or else an integer first
    tensor of two dimensions (b, s). Operations need a ``flops_per_sample(sequence_length)`` method
    on the LightningModule: model operations, forward and backward, of one sample. ``mfu`` is these
    operations over the peak of all devices (arXiv 2204.02311, appendix B).

    Args:
        window: Number of steps to average over.
        peak_tflops: Peak of one device, in the precision of the matrix products; None: the figure
            of the data sheet, or no ``mfu`` if the planner does not know the device.
    """

    def __init__(self, window: Size = 20, peak_tflops: float | None = None) -> None:
        check_arguments(Throughput.__init__, locals())
        if peak_tflops is not None and peak_tflops <= 0:
            raise ValueError(f"peak_tflops={peak_tflops} must be greater than 0, or None")
        self._peak_flops = None if peak_tflops is None else peak_tflops * 1e12
        # Seconds, samples, tokens and operations of a step.
        self._steps: deque[tuple[float, int, int, float]] = deque(maxlen=window)
        self._last: float | None = None
        self._paused = 0.0
        self._pause_began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discard the steps of an earlier run."""
        self._steps.clear()
        self._last = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._pause_began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restart the clock."""
        self._paused += time.perf_counter() - self._pause_began

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Measure the step and log the rates."""
        now, is_first = time.perf_counter(), self._last is None
        samples, length = batch_shape(batch)
        samples *= replicas(trainer)
        flops = samples * flops_per_sample(pl_module, length)
        if self._last is not None:
            self._steps.append((now - self._last - self._paused, samples, samples * length, flops))
            self._log_rates(trainer)
        # A module that counts its operations does so once, in the first step.
        self._last, self._paused = time.perf_counter() if is_first else now, 0.0

    def _log_rates(self, trainer: Trainer) -> None:
        seconds, samples, tokens, flops = map(sum, zip(*self._steps, strict=True))
        self.log("samples_per_s", samples / seconds, batch_size=1)
        if tokens:
            self.log("tokens_per_s", tokens / seconds, prog_bar=True, batch_size=1)
        if flops:
            self.log("model_tflops_per_s", flops / seconds / 1e12, batch_size=1)
            device = device_name(trainer.strategy.root_device)
            peak = self._peak_flops or known_peak_flops(device, str(trainer.precision))
            if peak is not None:
                self.log(
                    "mfu", flops / seconds / peak / trainer.world_size, prog_bar=True, batch_size=1
                )


def device_name(device: torch.device) -> str:
    """Return a GPU's name, or the device's type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def replicas(trainer: Trainer) -> int:
    """Return the number of ranks that read different data."""
    layout = getattr(trainer.strategy, "layout", None)
    return trainer.world_size if layout is None else layout.num_replicas


def flops_per_sample(module: LightningModule, length: int) -> float:
    """Return the model operations, forward and backward, of a sample of ``length`` tokens.

    The result is 0 if the module does not report them."""
    count = getattr(module, "flops_per_sample", None)
    return float(count(length)) if callable(count) and length else 0.0


def batch_shape(batch: object) -> tuple[int, int]:
    """Return (samples, tokens in each) of this rank's batch.

    It has 0 tokens if it does not look like token ids."""
    tensor = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if tensor is None:
        tensor = next(iterate_tensors(batch), None)
    if tensor is None or tensor.dim() == 0:
        return 1, 0
    is_tokens = tensor.dim() == 2 and tensor.dtype in (torch.int16, torch.int32, torch.int64)
    return tensor.size(0), tensor.size(1) if is_tokens else 0
