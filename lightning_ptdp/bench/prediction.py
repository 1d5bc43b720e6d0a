"""What the planner expects of a step that is measured."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer

from lightning_ptdp.callbacks.throughput import device_name
from lightning_ptdp.models.config import TransformerConfig
from lightning_ptdp.planner import (
    Choice,
    Job,
    device_here,
    find_precision,
    find_software,
    gpt_sizes,
    simulated_step_time,
    step_time,
)
from lightning_ptdp.schedule.generators import schedule_name

__all__ = ["predicted_seconds"]


def predicted_seconds(trainer: Trainer, module: LightningModule, *, samples: int, length: int) -> float | None:
    """Seconds of an optimizer step; None where the planner does not know the model, the device or the schedule.

    Args:
        trainer: With its strategy.
        module: What is trained.
        samples: Of a step, over all replicas.
        length: Tokens of a sample.
    """
    model, strategy, accumulated = getattr(module, "config", None), trainer.strategy, trainer.accumulate_grad_batches
    device, layout = device_here(device_name(strategy.root_device)), getattr(strategy, "layout", None)
    if not isinstance(model, TransformerConfig) or device is None or layout is None or not length:
        return None
    config, rows = strategy.config, samples // layout.num_replicas // accumulated
    microbatches = config.microbatches(rows)
    try:
        job = Job(
            model=gpt_sizes(model),
            world_size=layout.world_size,
            global_batch_size=samples // accumulated,
            device=device,
            precision=find_precision(str(trainer.precision)),
            software=find_software("ours" if config.compile == "none" else "ours-compiled"),
            sequence_length=length,
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
        return (simulated_step_time if layout.size("pipeline") > 1 else step_time)(job, choice).total * accumulated
    except (ValueError, KeyError):  # a precision or a schedule of its own
        return None
