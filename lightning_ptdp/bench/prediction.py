"""Planner's prediction for a step that is measured."""

from __future__ import annotations

from dataclasses import dataclass

from lightning.pytorch import Trainer
from torch import nn

from lightning_ptdp.callbacks.throughput import device_name
from lightning_ptdp.planner import (
    Choice,
    Job,
    device_here,
    find_precision,
    find_software,
    fullest_rank,
    simulated_step_time,
    step_time,
    whose_figures,
)
from lightning_ptdp.schedule.generators import schedule_name
from lightning_ptdp.strategy.planning import described

__all__ = ["Prediction", "predicted"]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Time and memory that the planner predicts for a step.

    Attributes:
        seconds: Time of an optimizer step; None if the planner does not know the model, the device
            or the schedule.
        nbytes: Peak bytes of the tensors of the rank that needs most.
        figures: Origin of the device's figures.
    """

    seconds: float | None = None
    nbytes: float | None = None
    figures: str = ""


def predicted(
    trainer: Trainer, module: nn.Module | None, *, samples: int, length: int
) -> Prediction:
    """Return the planner's prediction for an optimizer step.

    Args:
        trainer: Trainer with its strategy.
        module: The trained model before it was cut; None if it is not known.
        samples: Samples of a step, over all replicas.
        length: Tokens of a sample.
    """
    strategy, accumulated = trainer.strategy, trainer.accumulate_grad_batches
    device, layout = (
        device_here(device_name(strategy.root_device)),
        getattr(strategy, "layout", None),
    )
    if module is None or device is None or layout is None:
        return Prediction()
    config, rows = strategy.config, samples // layout.num_replicas // accumulated
    microbatches = config.microbatches(rows)
    precision, software = (
        str(trainer.precision),
        "ours" if config.compile == "none" else "ours-compiled",
    )
    try:
        model = described(
            module,
            config,
            length=length or None,
            precision=precision,
            software=software,
            device=device,
        )
        job = Job(
            model=model,
            world_size=layout.world_size,
            global_batch_size=samples // accumulated,
            device=device,
            precision=find_precision(precision),
            software=find_software(software),
            sequence_length=length or model.sequence_length,
        )
        choice = Choice(
            layout=layout,
            micro_batch_size=max(1, rows // microbatches),
            num_microbatches=microbatches,
            schedule=schedule_name(config.schedule, config.virtual_pipeline_size),
            recompute=config.recompute,
            distribute_saved_activations=config.distribute_saved_activations,
            shard_optimizer=config.shard_optimizer,
        )
        timed = simulated_step_time if layout.size("pipeline") > 1 else step_time
        memory = fullest_rank(job, choice)
        return Prediction(
            seconds=timed(job, choice).total * accumulated,
            nbytes=memory.total - memory.communicators,
            figures=whose_figures(device, job.processes),
        )
    except (ValueError, KeyError):  # the planner does not know the precision or the schedule
        return Prediction()
