"""Callbacks that log numbers of a training step, its throughput, and the share of counted steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptdp.base.nested import iterate_tensors
from lightning_ptdp.base.option_types import Size, check_arguments
from lightning_ptdp.planner import known_peak_flops


class GradientNorm(Callback):
    """Callback that logs ``grad_norm``: the global 2-norm of the gradient before clipping.

    A strategy that shards parameters computes the norm while it clips, and provides it as
    ``gradient_norm`` (a scalar tensor, or None before the first clipped step). Without clipping,
    ``compute_gradient_norm()`` of the strategy is called. If every rank holds the whole gradient
    (one device, DDP), the norm is computed here. With any other strategy nothing is logged."""

    def __init__(self) -> None:
        self._norm: Tensor | None = None

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Compute the norm before clipping changes the gradient."""
        strategy = trainer.strategy
        if hasattr(strategy, "compute_gradient_norm"):
            self._norm = None if trainer.gradient_clip_val else strategy.compute_gradient_norm()
        elif isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
            gradients = [
                p.grad
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None
            ]
            self._norm = torch.nn.utils.get_total_norm(gradients)

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Log the last step's norm."""
        norm = (
            self._norm
            if self._norm is not None
            else getattr(trainer.strategy, "gradient_norm", None)
        )
        if norm is not None:
            self.log("grad_norm", norm, batch_size=1)


class LearningRate(Callback):
    """Callback that logs ``learning_rate`` with the other metrics of a step.

    One number is logged if all parameter groups have the same rate, otherwise one per group
    (``learning_rate/1`` …). With several optimizers the first one is used. Lightning's
    ``LearningRateMonitor`` draws the same curve for every group."""

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        """Log the rate of the step that begins."""
        if not trainer.optimizers:
            return
        rates = [float(group["lr"]) for group in trainer.optimizers[0].param_groups]
        same = len(set(rates)) == 1
        for number, rate in enumerate(rates[:1] if same else rates, start=1):
            self.log("learning_rate" if same else f"learning_rate/{number}", rate, batch_size=1)


class TrainPerplexity(Callback):
    """Callback that logs ``train_perplexity``: e to the logged mean loss of the step.

    It is computed from the mean loss. Computed inside ``training_step`` it would be a mean of
    exponentials over the microbatches.

    Args:
        loss: Name under which the module logs its mean loss in nats per token; None: the module's
            attribute ``perplexity_loss``, or else ``train_loss``.
    """

    def __init__(self, loss: str | None = None) -> None:
        self.loss = loss

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Log the perplexity, if the loss was logged."""
        name = self.loss or getattr(pl_module, "perplexity_loss", "train_loss")
        loss = trainer.callback_metrics.get(name)
        if loss is not None:
            self.log("train_perplexity", torch.exp(loss), batch_size=1)


# ---- Callback that logs throughput: samples, tokens and model operations per second --------------


class Throughput(Callback):
    """Callback that logs the throughput over all devices, as the mean over the last steps.

    The metrics are ``samples_per_s``, ``tokens_per_s``, ``model_tflops_per_s`` and ``mfu``. Time
    runs from the end of one step to the end of the next, so that data loading is included. The
    first step and validation are excluded. The first three metrics are totals over the replicas.
    ``model_tflops_per_s`` and ``mfu`` are logged on rank 0 only.
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
        *_: object,
    ) -> None:
        """Measure the step and log the rates."""
        now = time.perf_counter()
        is_first = self._last is None
        samples, length = batch_shape(batch)
        samples *= replicas(trainer)
        # Counting takes seconds, and only rank 0's value is written.
        flops = samples * flops_per_sample(pl_module, length) if trainer.is_global_zero else 0.0
        if self._last is not None:
            self._steps.append((now - self._last - self._paused, samples, samples * length, flops))
            self._log_rates(trainer)
        # A module that counts its operations does so once, in the first step.
        self._last = time.perf_counter() if is_first else now
        self._paused = 0.0

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


_SLOWER = 0.05  # fraction of the time; a rank that waits so much less than another one is slower


class Goodput(Callback):
    """Callback that logs the share of wall time in steps that counted, as ``goodput``.

    Time runs from the start of the first process of the training, through all restarts, to the end.
    The rest are imports, set-up, loading of data, validation, checkpoints, waiting between runs,
    and steps that were repeated because they were not in the checkpoint from which a run resumed.

    With the "ptdp" strategy, the rank that waited least for the others in this run is logged as
    ``slowest_rank``, and the largest share of the time for which a rank waited as ``longest_wait``.
    """

    def __init__(self) -> None:
        self._began: float = psutil.Process().create_time()
        self._in_steps = self._batch_began = 0.0
        self._between = self._ended = 0.0
        self.slowest = ""
        """Description of the slowest rank, after training; "" if all ranks waited equally."""

    @property
    def share(self) -> float:
        """Return the share until now."""
        return self._in_steps / max(time.time() - self._began, 1e-9)

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self._batch_began = time.perf_counter()
        self._between += self._batch_began - (self._ended or self._batch_began)

    def on_train_start(self, *_: Any) -> None:
        """Forget the waits of an earlier run."""
        self._between = self._ended = 0.0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Count the batch; in the first one, ranks also wait for others that start later."""
        now = time.perf_counter()
        if not self._ended:
            self._first_ended = now
            getattr(trainer.strategy, "clear_waits", lambda: None)()
        self._ended = now
        self._in_steps += now - self._batch_began

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the share, on global rank 0."""
        found = {"goodput": self.share}
        strategy = trainer.strategy
        if self._ended and hasattr(strategy, "gather_waits"):
            seconds = time.perf_counter() - self._first_ended
            found |= self._compare(strategy.gather_waits(self._between), seconds)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(found, step=trainer.global_step)

    def _compare(
        self, ranks: Sequence[tuple[float, Mapping[str, float]]], seconds: float
    ) -> dict[str, float]:
        """Describe the rank that waited least, and return the numbers to log."""
        totals = [sum(waits.values()) for _, waits in ranks]
        rank = totals.index(min(totals))
        longest = max(totals)
        seconds = max(seconds, longest)  # the first batch of another rank may have ended earlier
        if longest - totals[rank] < _SLOWER * seconds:
            return {}
        between, waits = ranks[rank]
        most = max(waits, key=lambda what: waits[what], default="nothing")
        self.slowest = (
            f"rank {rank} waited {totals[rank] / seconds:.0%} of the time, most for {most} "
            f"(other ranks up to {longest / seconds:.0%}); {between / seconds:.0%} were between "
            f"its steps (data, validation, saves)"
        )
        return {"slowest_rank": rank, "longest_wait": longest / seconds}

    def state_dict(self) -> dict[str, Any]:
        """Return what a run that resumes here continues."""
        return {"began": self._began, "in_steps": self._in_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the training that was saved."""
        self._began = float(state_dict["began"])
        self._in_steps = float(state_dict["in_steps"])
