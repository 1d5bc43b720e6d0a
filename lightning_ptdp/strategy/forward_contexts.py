"""Contexts around the forwards of a rank.

``make_surroundings`` builds the list; ``check_surroundings`` refuses impossible combinations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_ptdp.attention import ATTENTIONS
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.context_parallel import ContextParallel, why_not
from lightning_ptdp.engine.step_random import StepRandomness
from lightning_ptdp.forward.deferred_weight_gradients import WeightGradients
from lightning_ptdp.forward.own_forward import DirectCalls
from lightning_ptdp.forward.surroundings import Surrounding, Surroundings
from lightning_ptdp.forward.token_mixing import SplitTokens
from lightning_ptdp.keyed_dropout import KeyedDropout
from lightning_ptdp.parallel_model import ParallelModel
from lightning_ptdp.pipeline.containers import layers_of
from lightning_ptdp.pipeline.discover import find_blocks
from lightning_ptdp.pipeline.placeholders import Placeholder
from lightning_ptdp.schedule.generators import may_split_backward
from lightning_ptdp.strategy.running_strategy import RunningStrategy
from lightning_ptdp.tensor_parallel import SplitRandomness
from lightning_ptdp.tensor_parallel.kinds.sharded_experts import ReusedHostReads
from lightning_ptdp.tensor_parallel.kinds.vocabulary import VocabularyParallelEmbedding
from lightning_ptdp.tensor_parallel.randomness import PlacedDropout
from lightning_ptdp.tensor_parallel.region import sees_full_sequence
from lightning_ptdp.tensor_parallel.split_features import SplitFeatures

_HEADS = ("num_heads", "num_attention_heads", "n_head")


def make_surroundings(strategy: RunningStrategy) -> Surroundings:
    """Return the contexts around the forwards of this rank, the outermost first.

    Among torch's function modes, the one entered last sees a call first. Calls that it makes itself
    go to the modes around it. This determines the order:

    - Random numbers of the step are first, because their hooks must be the outermost of a block.
    - Keyed dropout is last, because it must see attention with dropout before context parallelism
      splits that attention over slices of the sequence.
    - Functions that combine tokens are watched last, as the user calls them.
    - Deferred weight gradients are before both of these modes, because the modes may replace a call
      by matrix products, which must be deferrable too."""
    config = strategy.config
    parallel = strategy.parallel
    context = strategy.mesh.group("context")
    tensor = strategy.mesh.group("tensor")
    shards = [] if parallel.shards is None else [parallel.shards]
    entries: list[Surrounding] = [*shards, _step_randomness(strategy)]
    watches = config.compile == "none"
    blocks = _local(_layers(parallel), parallel.module).values()
    if may_split_backward(config.schedule):
        entries.append(WeightGradients(parallel.casts))
    if config.recompute in ("full", "selective") and strategy.mesh.group("expert").size > 1:
        entries.append(ReusedHostReads())
    if context.size > 1:
        sliced = ContextParallel(
            group=context,
            attention=config.context_parallel_attention,
            sequence_dims=config.sequence_dims or {},
            needs_positions=config.context_parallel_positions,
            sequence_parallel_size=config.tensor_parallel_size if config.sequence_parallel else 1,
            watches=watches,
            blocks=blocks,
            attending=[
                stage
                for stage, (start, stop) in enumerate(parallel.ranges or [(0, 1)])
                if start < stop
            ],
        )
        entries.append(sliced)
    if config.keyed_dropout:
        entries.append(
            KeyedDropout(
                tensor=tensor,
                context=context,
                sequence_parallel=config.sequence_parallel,
                seed=strategy.run.seed,
                sequence_dims=config.sequence_dims or {},
            )
        )
    elif tensor.size > 1 and (parallel.split_blocks is not None or not config.sequence_parallel):
        returns = any(
            sees_full_sequence(m) or (isinstance(m, PlacedDropout) and not m.split)
            for m in parallel.module.modules()
        )
        entries.append(
            SplitRandomness(
                rank=tensor.rank,
                device=strategy.root_device,
                blocks=parallel.split_blocks,
                returns=returns,
            )
        )
    if config.sequence_parallel and watches:
        modules = parallel.module.named_modules()
        splits = [
            name
            for name, module in modules
            if isinstance(module, VocabularyParallelEmbedding) and module.sequence_parallel
        ]
        entries.append(SplitTokens(blocks, embeddings=splits))
    entries.append(DirectCalls())
    if tensor.size > 1 and watches:
        copies = {
            parameter: managed.name
            for parameter, managed in parallel.parameters.items()
            if "tensor" not in (*managed.placement.sharded, *managed.placement.partial)
        }
        entries.append(SplitFeatures(parallel.plan.numbers, copies))
    return Surroundings(entries)


def _step_randomness(strategy: RunningStrategy) -> StepRandomness:
    config = strategy.config
    mesh = strategy.mesh
    parallel = strategy.parallel
    module = parallel.module
    draws = mesh.layout.world_size > 1 or config.runs_backward
    layers = _layers(parallel) if draws else []
    blocks = _local(layers, module)
    splits_ends = config.sequence_parallel and parallel.split_blocks is None
    if splits_ends:
        # The sequence is already split after the embedding.
        around = tuple(f"{name}." for name in layers)
        drops = [
            name
            for name, child in module.named_modules()
            if isinstance(child, nn.Dropout) and not f"{name}.".startswith(around)
        ]
        blocks |= {len(layers) + index: name for index, name in enumerate(drops)}
    place = (mesh.group("tensor").rank if splits_ends else 0, mesh.group("context").rank)
    absent = parallel.cut.earlier_blocks if parallel.cut is not None else []
    return StepRandomness(
        module=module, blocks=blocks, absent=absent, place=place, device=strategy.root_device
    )


def _layers(parallel: ParallelModel) -> list[str]:
    try:
        names = find_blocks(parallel.module) if parallel.blocks is None else parallel.blocks
        return [layer.name for layer in layers_of(parallel.module, names)]
    except ValueError:  # nothing is repeated, and nothing is cut
        return []


def _local(layers: Sequence[str], module: nn.Module) -> dict[int, str]:
    """Return the number and name of the layers on this pipeline stage."""
    return {
        number: name
        for number, name in enumerate(layers)
        if not isinstance(module.get_submodule(name), Placeholder)
    }


def check_surroundings(model: nn.Module, config: PTDPConfig) -> None:
    """Check the attention of a whole, uncut model.

    Raises:
        ValueError: Its attention cannot be intercepted, or context parallelism does not divide its
            heads (all-to-all attention).
    """
    if config.context_parallel_size == 1:
        return
    reason = why_not(model)
    if reason is not None:
        raise ValueError(
            f"context_parallel_size={config.context_parallel_size} cannot run this model: "
            f"{reason}. Use context_parallel_size=1"
        )
    for module in model.modules():
        model_config: Any = getattr(module, "config", None)
        heads = next(
            (n for key in _HEADS if isinstance(n := getattr(model_config, key, None), int)), None
        )
        if heads is not None:
            ATTENTIONS[config.context_parallel_attention].check_heads(
                max(1, heads // config.tensor_parallel_size), config.context_parallel_size
            )
