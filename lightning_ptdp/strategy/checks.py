"""What can be known to be wrong before a process is started."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from lightning_ptdp._lightning import LightningNames
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.context_parallel import check_sequence
from lightning_ptdp.layout import ParallelLayout, nearest_divisors
from lightning_ptdp.models.plans import find_plan
from lightning_ptdp.parallelize import layer_ranges
from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.recompute import check_recomputation
from lightning_ptdp.strategy.context import check_context_parallel
from lightning_ptdp.tensor_parallel import ParallelPlan

__all__ = ["check_loader", "check_model", "check_sequence_length", "check_trainer", "plan_of"]

CUT_MARK = "_ptdp_layout"


def plan_of(module: Any, config: PTDPConfig) -> ParallelPlan:
    """The plan: the strategy's own, else the module's ``configure_parallel()``, else that of a known model inside, else an empty one.

    Raises:
        ValueError: ``configure_parallel`` returned something else, or tensor parallelism has nothing to shard.
    """
    plan = config.plan
    if plan is None and hasattr(module, "configure_parallel"):
        plan = module.configure_parallel()
        if not isinstance(plan, ParallelPlan):
            raise ValueError(f"configure_parallel() returned {type(plan).__name__}; return a ParallelPlan")
    if plan is None and isinstance(module, nn.Module):
        plan = find_plan(module)
    plan = plan if plan is not None else ParallelPlan()
    if config.tensor_parallel_size > 1 and not plan.tensor:
        raise ValueError(
            f"tensor_parallel_size={config.tensor_parallel_size}, but nothing says which modules to shard: give "
            'PTDPStrategy(plan=ParallelPlan(tensor={"model.blocks.*.mlp.up": "column", ...})), define configure_parallel() on the '
            "LightningModule, or use tensor_parallel_size=1"
        )
    return plan


def check_trainer(module: Any, trainer: Any, config: PTDPConfig, layout: ParallelLayout, names: LightningNames) -> None:
    """Refuse what the schedule cannot honour.

    Raises:
        MisconfigurationException: Names what is asked for, why it cannot be, and what would work.
    """
    refuse = names.MisconfigurationException
    if not module.automatic_optimization and layout.world_size > 1:
        raise refuse(
            "automatic_optimization=False (manual optimization) cannot run under the ptdp strategy with several processes: the "
            "schedule, not training_step, decides when backward runs. Use automatic optimization"
        )
    if layout.model_parallel_size > 1:
        for callback in trainer.callbacks:
            if isinstance(callback, (*names.WeightAveragingCallbacks, *names.TunerCallbacks)):
                raise refuse(
                    f"the callback {type(callback).__name__} copies or re-runs the whole model, which no rank holds under tensor or "
                    "pipeline parallelism. Use it with tensor_parallel_size=1 and pipeline_parallel_size=1"
                )
        if names.is_overridden("backward", module):
            raise refuse(
                "LightningModule.backward is overridden, but under tensor or pipeline parallelism the schedule runs the backward. Use "
                "torch.autograd hooks or on_after_backward instead"
            )
    nodes, replicas = config.data_parallel_replicas, layout.data_parallel_size
    if replicas % nodes:
        raise refuse(
            f"data_parallel_replicas={nodes} does not divide the data_parallel_size of {replicas}: every node must hold as many replicas; "
            f"use one of {nearest_divisors(replicas, nodes)}"
        )
    if str(trainer.precision) == "16-true" and not config.master_weights:
        raise refuse(
            "precision='16-true' with master_weights=False: updates of float16 parameters are mostly rounded away, and their loss scale "
            "cannot be divided out in float16; use master_weights=True, precision='16-mixed' or precision='bf16-true'"
        )


def check_model(module: Any, config: PTDPConfig, layout: ParallelLayout) -> None:
    """Check the sizes of the model against the layout, on a copy built on the meta device where ``configure_model`` builds it.

    Raises:
        ValueError: Names the field, the value and what would work.
    """
    if layout.model_parallel_size == 1 and config.recompute == "none":
        return
    if CUT_MARK in vars(module):
        raise ValueError(
            f"this {type(module).__name__} was already cut for the layout {vars(module)[CUT_MARK]!r}; make a new module (and load the "
            "checkpoint) to run it under another Trainer"
        )
    whole = _whole_model(module, config)
    _check_compiled(whole)
    plan = plan_of(whole, config)
    check = getattr(whole, "check_parallel", None)
    if check is not None:
        check(layout)
    plan.check(whole, tensor_parallel_size=layout.tensor_parallel_size, sequence_parallel=layout.sequence_parallel)
    if layout.tensor_parallel_size > 1:
        plan.resolve(whole)
    check_context_parallel(whole, config)
    blocks, ranges = plan.blocks, tuple[tuple[int, int], ...]()
    if layout.pipeline_parallel_size > 1:
        parts = find_parts(whole, blocks=plan.blocks, before=plan.before, after=plan.after)
        blocks, ranges = parts.blocks, layer_ranges(whole, parts=parts, layout=layout, partition=config.partition)
    check_recomputation(
        whole,
        policy=config.recompute,
        layers=config.recompute_layers,
        blocks=blocks,
        ranges=ranges,
        selective=plan.selective,
    )


def _check_compiled(model: Any) -> None:
    for name, _ in model.named_modules():
        if name.rpartition(".")[2] == "_orig_mod":
            raise ValueError(
                f"{name.removesuffix('._orig_mod')} is wrapped by torch.compile(), which gives all modules inside other names and would "
                "compile across the stages: compile each block in place instead (for block in blocks: block.compile())"
            )


def check_loader(loader: Any, config: PTDPConfig, layout: ParallelLayout) -> None:
    """Compare the sizes of a loader's batches (or a data module's, whose ``batch_plans`` may follow from the number of replicas) with the
    microbatches and the schedule.

    Raises:
        ValueError: A replica's batch is smaller than ``num_microbatches`` or ``micro_batch_size``, or the schedule does not take as many
            microbatches as there would be.
    """
    if hasattr(loader, "batch_plans"):
        plans = loader.batch_plans(num_replicas=layout.data_parallel_size)
        sizes = [plan.replica_batch for plan in plans]
    else:
        sizes = [getattr(loader, "batch_size", None)]
    for size in sizes:
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            _check_batch(size, config)


def _check_batch(size: int, config: PTDPConfig) -> None:
    for field, value in (("num_microbatches", config.num_microbatches), ("micro_batch_size", config.micro_batch_size)):
        if value is not None and size < value:
            raise ValueError(
                f"{field}={value} is larger than the batch of {size} samples that the train dataloader gives each replica; use "
                f"{field}={size} or less, or a batch size of at least {value}"
            )
    if config.micro_batch_size is not None:
        try:
            config.build_schedule(config.microbatches(size))
        except ValueError as error:
            raise ValueError(
                f"micro_batch_size={config.micro_batch_size} cuts a replica's batch of {size} samples into {config.microbatches(size)} "
                f"microbatches, which the schedule does not take: {error}"
            ) from None


def check_sequence_length(data: Any, config: PTDPConfig) -> None:
    """Compare the data's ``sequence_length``, if it tells one, with what sequence and context parallelism split.

    Raises:
        ValueError: It does not divide.
    """
    length, size = getattr(data, "sequence_length", None), config.tensor_parallel_size
    if isinstance(length, int):
        check_sequence(length, config.context_parallel_size, sequence_parallel_size=size if config.sequence_parallel else 1)
    if config.sequence_parallel and isinstance(length, int) and length % size:
        nearest = sorted({length // size * size, -(-length // size) * size} - {0})
        raise ValueError(
            f"sequence_length={length} is not divisible by tensor_parallel_size={size}, over which sequence_parallel=True splits it; "
            f"use sequence_length={' or '.join(map(str, nearest))}, or sequence_parallel=False"
        )


def _whole_model(module: Any, config: PTDPConfig) -> nn.Module:
    """The uncut module; if it is built in ``configure_model``, a copy built without allocating anything."""
    if any(True for _ in module.parameters()) or not config.meta_init:
        return module
    trainer = getattr(module, "_trainer", None)
    module._trainer = None
    try:
        clone = copy.deepcopy(module)
    finally:
        module._trainer = trainer
    with torch.device("meta"):
        clone.configure_model()
    return clone
