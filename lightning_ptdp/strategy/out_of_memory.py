"""Message of a rank that runs out of memory.

It compares the expected and the actual size of each part, and names options that reduce the part
that is too large. It is computed on the host alone, from sizes and the allocator's counts, because
the device has failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import get_args

import torch
from torch import Tensor, nn

from lightning_ptdp.base.output import columns
from lightning_ptdp.callbacks.step_metrics import device_name
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.planner import Job, device_here, find_device, find_precision
from lightning_ptdp.planner.memory import rank_memory
from lightning_ptdp.planner.plan_report import strategy_arguments
from lightning_ptdp.schedule.generators import FAMILIES, schedule_name
from lightning_ptdp.shims.lightning import fits
from lightning_ptdp.strategy.layout_choice import fastest_layouts
from lightning_ptdp.strategy.planning import described_choice, described_job, type_of_states
from lightning_ptdp.strategy.running_strategy import RunningStrategy
from lightning_ptdp.world.layout import ParallelLayout, Sharding

_ACTIVATIONS = "activations"
_GIB = 2**30
_MUCH = 1.1
_SHOWN = 3

Parts = dict[str, float]


def explain_memory(strategy: RunningStrategy) -> str:
    """Return the note for the error of a rank that is out of memory."""
    config = strategy.config
    layout = strategy.layout
    engine = strategy._engine
    mixture = any(_experts(strategy.model))
    if engine is None:
        larger = _larger_layout(layout, mixture=mixture)
        return (
            f"out of memory while the model was set up. Use {larger}, so that each rank has a "
            "smaller part"
        )
    trainer = strategy.lightning_module.trainer
    precision = str(trainer.precision)
    batch = getattr(trainer.train_dataloader, "batch_size", None) if fits(trainer) else None
    b = config.micro_batch_size or (
        -(-batch // config.microbatches(batch)) if isinstance(batch, int) else None
    )
    rows = batch if isinstance(batch, int) else (b or 1) * (config.usual_microbatches or 1)
    device = device_here(device_name(strategy.root_device))
    expected = _expected(strategy, precision)
    fitting = ""
    # The planner may not know the model or the precision, and no failure of it hides this error.
    with contextlib.suppress(Exception):
        job = described_job(
            strategy.model,
            config,
            world_size=layout.world_size,
            batch=rows,
            device=device or find_device("cpu"),
            length=None,
            precision=precision,
        )
        if b is not None:
            expected |= _expected_activations(strategy, job, b)
        if device is not None:
            fitting = _fitting_options(job, rows)
    note = memory_note(
        expected,
        _found(strategy, engine.gradients.local()),
        config=config,
        layout=layout,
        mixture=mixture,
    )
    return note + fitting


def _fitting_options(job: Job, rows: int) -> str:
    """Return the fastest layouts that fit by the planner's estimate; "" if there are none."""
    lines = [
        f"  {strategy_arguments(candidate)}: {candidate.memory.total / _GIB:.3g} GiB"
        for _, candidate in fastest_layouts(job, lambda replicas: rows)[:_SHOWN]
    ]
    return "\n".join(["\nlayouts that fit, by the planner's estimate:", *lines]) if lines else ""


def _expected(strategy: RunningStrategy, precision: str) -> Parts:
    """Return the expected bytes of this rank's parameters, gradients and Adam's state."""
    module = strategy.model
    config = strategy.config
    layout = strategy.layout
    try:
        sizes = find_precision(precision, states=type_of_states(module))
    except ValueError:
        sizes = find_precision("32-true")
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    experts = sum(p.numel() for p in _experts(module) if p.requires_grad)
    shards, expert_shards = (
        layout.size(axes) if config.shards_optimizer else 1
        for axes in ("replica_sum", "expert_replicas")
    )
    stepped = (trained - experts) / shards + experts / expert_shards
    return {
        "parameters": sum(p.nbytes for p in module.parameters())
        / (shards if config.shard == "parameters" else 1),
        "gradients": sizes.gradient * (stepped if config.shards_gradients else trained),
        "optimizer": 0.0 if config.offload_optimizer else sizes.state * stepped,
    }


def _expected_activations(strategy: RunningStrategy, job: Job, micro_batch_size: int) -> Parts:
    """Return the expected bytes of the activations; empty for a schedule without an estimate."""
    config = strategy.config
    layout = strategy.layout
    if schedule_name(config.schedule, config.virtual_pipeline_size) not in FAMILIES:
        return {}
    choice = described_choice(
        config,
        layout,
        micro_batch_size=micro_batch_size,
        num_microbatches=config.usual_microbatches or 1,
    )
    memory = rank_memory(job, choice, layout.coordinates(strategy.own_rank)["pipeline"])
    return {_ACTIVATIONS: memory.activations + memory.logits + memory.working}


def _experts(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of modules that hold several experts."""
    for child in module.modules():
        number = getattr(child, "num_experts", None)
        yield from (
            p
            for p in child.parameters(recurse=False)
            if isinstance(number, int) and p.dim() > 1 and p.size(0) == number
        )


def _found(strategy: RunningStrategy, gradients: Iterable[Tensor]) -> Parts:
    """Return the bytes that are held now, by part.

    Activations are the remainder of the allocator's peak, where it is known."""
    device = strategy.root_device
    parameters = [*strategy.model.parameters()]
    optimizers = strategy.optimizers
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    kinds: dict[str, Iterable[object]] = {
        "parameters": parameters,
        "gradients": [*gradients, *(p.grad for p in parameters)],
        "optimizer": chain(*(state.values() for state in states), *groups),
    }
    # Tied parameters, gradients that are views of buckets, and optimizer parameters that are views
    # share storage.
    seen = set[int]()
    parts: Parts = {name: _bytes(tensors, seen) for name, tensors in kinds.items()}
    if device.type == "cuda":
        parts[_ACTIVATIONS] = max(
            0.0, torch.cuda.max_memory_allocated(device) - sum(parts.values())
        )
    return parts


def memory_note(
    expected: Mapping[str, float],
    found: Mapping[str, float],
    *,
    config: PTDPConfig,
    layout: ParallelLayout,
    mixture: bool = False,
) -> str:
    """Return a table of expected and held bytes, and options that reduce the critical part.

    The critical part is the one that exceeds its expected size most, or else the largest.

    Args:
        expected: Bytes by part: parameters, gradients, optimizer, and activations if they can be
            predicted.
        found: Bytes that are held, by part.
        config: The strategy's options.
        layout: Degrees of parallelism.
        mixture: Whether the model has experts that can be distributed.
    """
    names = list(dict.fromkeys((*expected, *found)))
    rows = [
        [name, *(f"{part[name] / _GIB:.2f}" if name in part else "?" for part in (expected, found))]
        for name in names
    ]
    excess = {
        name: found[name] - expected[name]
        for name in expected
        if found.get(name, 0.0) > _MUCH * expected[name]
    }
    if excess:
        part = max(excess, key=lambda name: excess[name])
        reason = "more than expected"
    else:
        # The allocation that failed is not counted in what is held.
        sizes = {_ACTIVATIONS: found.get(_ACTIVATIONS, float("inf")), **expected}
        part = max(sizes, key=lambda name: sizes[name])
        reason = "the largest part"
    table = columns([["GiB on this rank", "expected", "held"], *rows], words=(0,))
    return (
        f"{table}\n{part}: {reason}. Use "
        f"{', or '.join(_remedies(part, config, layout, mixture=mixture))}"
    )


def _remedies(part: str, config: PTDPConfig, layout: ParallelLayout, *, mixture: bool) -> list[str]:
    remedies = []
    if part == _ACTIVATIONS:
        if config.recompute == "none":
            remedies.append("recompute='full' or 'offload' (it is 'none')")
        remedies.append(_smaller_microbatches(config))
        if layout.tensor_parallel_size > 1 and not layout.sequence_parallel:
            remedies.append("sequence_parallel=True")
    if part in get_args(Sharding) and layout.size("replica_sum") > 1:
        # The values of ``shard`` include those before them.
        levels = get_args(Sharding)
        if levels.index(config.shard) < levels.index(part):
            remedies.append(f"shard='{part}'")
    if part == "optimizer" and not config.offload_optimizer:
        remedies.append("offload_optimizer=True")
    return [*remedies, _larger_layout(layout, mixture=mixture)]


def _larger_layout(layout: ParallelLayout, *, mixture: bool) -> str:
    t = layout.tensor_parallel_size
    p = layout.pipeline_parallel_size
    e = layout.expert_parallel_size
    experts = f"expert_parallel_size (it is {e}), " if mixture else ""
    return (
        f"a larger {experts}tensor_parallel_size (it is {t}) or pipeline_parallel_size (it is {p})"
    )


def _smaller_microbatches(config: PTDPConfig) -> str:
    if config.micro_batch_size is not None:
        return f"a smaller micro_batch_size (it is {config.micro_batch_size})"
    return (
        f"smaller microbatches with a larger num_microbatches (it is {config.usual_microbatches})"
    )


def _bytes(tensors: Iterable[object], seen: set[int]) -> float:
    """Return the bytes of storages that are not in ``seen``, and add them to it."""
    total = 0
    for storage in (tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)):
        total += 0 if storage.data_ptr() in seen else storage.nbytes()
        seen.add(storage.data_ptr())
    return float(total)
