"""Choice for ``layout="auto"``: the fastest possible layout by the planner's estimate.

A layout is possible if it fits into memory, and if the model and the data accept it. The estimate
is compared with the measured step time."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeVar

import torch

from lightning_ptdp.base.forked_processes import in_child
from lightning_ptdp.callbacks.step_metrics import device_name
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.planner import (
    RESERVE,
    Candidate,
    Job,
    Space,
    device_here,
    figures_source,
    search,
)
from lightning_ptdp.shims.lightning import Trainer
from lightning_ptdp.strategy.checkpoint_hooks import CheckpointHooks
from lightning_ptdp.strategy.checks.data import check_data, replica_batches
from lightning_ptdp.strategy.checks.model import check_model, full_model
from lightning_ptdp.strategy.checks.trainer import check_trainer
from lightning_ptdp.strategy.planning import described_job
from lightning_ptdp.strategy.precision import replacing
from lightning_ptdp.world.axes import divisors
from lightning_ptdp.world.layout import ParallelLayout

LayoutChoice = Literal["auto"]
Rows = Callable[[int], int | None]
_CHOSEN = (
    *ParallelLayout.options(),
    "num_microbatches",
    "micro_batch_size",
    "schedule",
    "partition",
    "recompute",
    "recompute_layers",
    "distribute_saved_activations",
    "shard",
    "channel_ctas",
    "tensor_overlap",
    "microbatch_group_size",
)
_TRIED = 8
_OFF = 0.15
_WARM_UP = 3
_GIB = 2**30
_T = TypeVar("_T")


@dataclass(kw_only=True)
class Forecast:
    """Expected time and memory of a step, and the times at which batches began.

    Attributes:
        seconds: Expected time of a step.
        memory: Expected bytes of the rank that needs most.
        text: The choice, the runner-up and the reason.
        figures: Origin of the device's figures.
        began: Times at which batches began.
    """

    seconds: float
    memory: float
    text: str
    figures: str = ""
    began: list[float] = field(default_factory=list)

    def batch_begins(self) -> None:
        """Record the start of a batch."""
        self.began.append(time.perf_counter())

    @property
    def measured(self) -> float | None:
        """Return the median seconds of a step, or None after too few steps.

        The first three steps do not count."""
        steps = [after - before for before, after in pairwise(self.began[_WARM_UP:])]
        return statistics.median(steps) if steps else None

    def report(self, trainer: Trainer, device: torch.device) -> None:
        """Log the forecast and the measurements, and print a message if it was far off."""
        if self.measured is None:
            return
        metrics = {
            "predicted_step_s": self.seconds,
            "measured_step_s": self.measured,
            "predicted_bytes": self.memory,
        }
        if device.type == "cuda":
            metrics["measured_bytes"] = float(torch.cuda.max_memory_allocated(device))
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        if verdict := self.verdict():
            print(verdict, flush=True)

    def verdict(self) -> str:
        """Return the message for the end of training; "" if the forecast was close."""
        measured = self.measured
        if measured is None or abs(self.seconds / measured - 1) <= _OFF:
            return ""
        return (
            f"layout='auto' expected {self.seconds:.3g} s per step, but a step took "
            f"{measured:.3g} s. The forecast used {self.figures}"
        )


def wants_choice(layout: LayoutChoice | None, config: PTDPConfig) -> bool:
    """Return True if the planner is to choose the layout.

    Raises:
        ValueError: ``layout`` is neither "auto" nor None, or options of the layout are given as
            well.
    """
    if layout not in ("auto", None):
        raise ValueError(
            f"layout={layout!r:.100} must be 'auto'. To set sizes, leave it out and use "
            "options such as tensor_parallel_size=2"
        )
    if layout is None:
        return False
    for option in fields(config):
        if option.name in _CHOSEN and (value := getattr(config, option.name)) != option.default:
            raise ValueError(
                f"layout='auto' chooses {option.name}, but {option.name}={value!r} is set. "
                "Leave one of them out"
            )
    return True


def chosen_layout(
    strategy: CheckpointHooks, trainer: Trainer, sources: Sequence[object]
) -> tuple[PTDPConfig, Forecast]:
    """Return the strategy's options with the layout that the planner chooses, and its forecast.

    Every process makes the same choice, because all read the same script, data and machine file.

    Raises:
        ValueError: The batch size or the device are unknown, or no layout fits.
    """
    rows = partial(_rows_per_replica, sources)
    if all(rows(replicas) is None for replicas in divisors(strategy.world_size)):
        raise ValueError(
            "layout='auto' needs the batch size. Give fit a DataLoader or a data module "
            "that has batch sizes"
        )
    options = strategy.config
    root_device = strategy.root_device
    forks = options.start_method == "fork" and strategy.world_size > 1
    # Asking a GPU for its name starts CUDA.
    name = _ask(partial(device_name, root_device), forks=forks and root_device.type != "cpu")
    device = device_here(name)
    if device is None:
        raise ValueError(
            f"layout='auto' does not know the device {name}. Run ptdp doctor "
            "--calibrate to measure it"
        )
    model = full_model(strategy.lightning_module, options)

    def fits(config: PTDPConfig) -> None:
        strategy.config = config
        try:
            check_trainer(strategy, trainer)
        except strategy._names.MisconfigurationException as error:
            raise ValueError(str(error)) from error
        convert = replacing(strategy)
        check_model(strategy.lightning_module, config, strategy.layout, convert=convert, full=model)
        for source in sources:
            check_data(source, config, strategy.layout)

    lengths = (data.sequence_length for data in sources if hasattr(data, "sequence_length"))
    describe = partial(
        described_job,
        model,
        options,
        world_size=strategy.world_size,
        batch=strategy.world_size,
        device=device,
        length=next(lengths, None),
        precision=str(trainer.precision),
    )
    job = _ask(describe, forks=forks)
    try:
        return choose(job, options, rows=rows, fits=fits)
    finally:
        strategy.config = options


def _ask(question: Callable[[], _T], *, forks: bool) -> _T:
    """Return the answer, from a child process if processes will be forked from this one."""
    return in_child(question) if forks else question()


def choose(
    job: Job, config: PTDPConfig, *, rows: Rows, fits: Callable[[PTDPConfig], None]
) -> tuple[PTDPConfig, Forecast]:
    """Return the options with the fastest layout that the model takes, and its forecast.

    Args:
        job: The training, with any batch size.
        config: The options, without a layout.
        rows: As for ``fastest_layouts``.
        fits: Raises a ValueError if the model or the data do not accept the options.

    Raises:
        ValueError: No layout fits, or the model accepts none of those that fit.
    """
    candidates = fastest_layouts(job, rows)
    device = job.device
    if not candidates:
        raise ValueError(
            f"layout='auto' found no layout that fits on {job.world_size} x {device.name} "
            f"with {(1 - RESERVE) * device.usable_bytes / _GIB:.3g} GiB each ({RESERVE:.0%} of "
            "the memory stays free). ptdp plan shows what each layout needs. Use more "
            "devices, or smaller batches"
        )
    refusals = []
    for i, (seconds, candidate) in enumerate(candidates):
        options: dict[str, Any] = candidate.choice.options()
        try:
            chosen = replace(config, **options)
            fits(chosen)
        except ValueError as error:
            refusals.append(f"{candidate.choice.describe()}: {error}")
            continue
        text = _describe_choice(candidate, seconds, candidates[i + 1 :])
        figures = figures_source(device, job.world_size)
        return chosen, Forecast(
            seconds=candidate.time.total, memory=candidate.memory.total, text=text, figures=figures
        )
    raise ValueError(
        f"layout='auto': the model supports none of the {len(candidates)} fastest layouts. "
        f"{refusals[0]}"
    )


def fastest_layouts(job: Job, rows: Rows) -> list[tuple[float, Candidate]]:
    """Return the fastest fitting layout of each degree of parallelism, by seconds per sample.

    Args:
        job: The training, with any batch size.
        rows: Returns the samples of a replica's batch for a number of replicas; None if the batch
            cannot be divided among so many.
    """
    best = dict[str, tuple[float, Candidate]]()
    for replicas in divisors(job.world_size):
        size = rows(replicas)
        if size is None:
            continue
        job = replace(job, global_batch_size=size * replicas)
        space = Space(data_parallel_sizes=(replicas,), context_parallel_sizes=(1,))
        for candidate in search(job, space, count=_TRIED).best:
            degrees = candidate.degrees
            seconds = candidate.time.total / job.global_batch_size
            if degrees not in best or seconds < best[degrees][0]:
                best[degrees] = seconds, candidate
    return sorted(best.values(), key=lambda pair: pair[0])[:_TRIED]


def _describe_choice(
    candidate: Candidate, seconds: float, alternatives: Sequence[tuple[float, Candidate]]
) -> str:
    def line(label: str, entry: Candidate) -> str:
        return (
            f"{label} {entry.choice.describe()}, {entry.time.total:.3g} s per step, "
            f"{entry.memory.total / _GIB:.3g} GiB"
        )

    text = line("layout='auto' chose", candidate)
    if not alternatives:
        return text
    slower, second = alternatives[0]
    best = _shares(candidate)
    runner_up = _shares(second)
    part = max(runner_up, key=lambda name: runner_up[name] * slower - best.get(name, 0.0) * seconds)
    return (
        f"{text}; {line('next', second)}: {slower / seconds - 1:.0%} slower per sample, "
        f"mostly in {part}"
    )


def _shares(candidate: Candidate) -> dict[str, float]:
    return {name: value / candidate.time.total for name, value in candidate.time.parts.items()}


def _rows_per_replica(sources: Sequence[Any], replicas: int) -> int | None:
    """Return the samples of a replica's batch; None if it cannot be divided among so many.

    The first loader or data module that knows its batch size is asked."""
    for source in sources:
        with contextlib.suppress(ValueError):
            if sizes := replica_batches(source, replicas):
                return max(sizes)
    return None
