"""How many parameters a rank holds, by stage."""

from __future__ import annotations

import functools

from lightning_ptdp.models.config import GPTConfig
from lightning_ptdp.models.size import layer_matrices, layer_parameters, norm_parameters, position_parameters
from lightning_ptdp.planner.expert_shape import experts_of
from lightning_ptdp.schedule.partition import partition_layers
from lightning_ptdp.world.layout import ParallelLayout

__all__ = [
    "expert_parameters",
    "layer_parameters",
    "layers_by_stage",
    "matrix_elements",
    "mixtures_by_stage",
    "stage_parameters",
]


def matrix_elements(model: GPTConfig, t: int, *, mixture: bool = False) -> int:
    """Elements of one layer's matrices on one tensor-parallel rank; of a ``mixture`` but for the experts that are chosen from."""
    return sum(outputs * inputs for outputs, inputs in layer_matrices(model, t, mixture=mixture))


@functools.lru_cache(maxsize=64)
def stage_parameters(model: GPTConfig, layout: ParallelLayout, *, balanced: bool = True) -> tuple[int, ...]:
    """Parameters of each stage on one tensor-parallel rank, in the order of stages, the vocabulary padded; ``balanced`` as of
    ``layers_by_stage``.

    A tied head is a second copy where it is on another rank than the embedding.
    """
    t = layout.tensor_parallel_size
    table = -(-model.vocabulary_size // t) * model.hidden_size
    dense, mixture = (layer_parameters(model, t, mixture=kind) for kind in (False, True))
    of_experts = expert_parameters(model, layout, balanced=balanced)
    counts = layers_by_stage(model, layout.num_stages, balanced=balanced)
    mixtures = mixtures_by_stage(model, layout.num_stages, balanced=balanced)
    stages = [
        (count - mixed) * dense + mixed * mixture + experts
        for count, mixed, experts in zip(counts, mixtures, of_experts, strict=True)
    ]
    stages[0] += table + position_parameters(model)
    shared = model.tie_embeddings and layout.last_stage_rank == layout.rank_of_stage(0)
    stages[-1] += norm_parameters(model) + (0 if shared else table)
    return tuple(stages)


@functools.lru_cache(maxsize=64)
def layers_by_stage(model: GPTConfig, num_stages: int, *, balanced: bool = True) -> tuple[int, ...]:
    """How many layers each stage has: the split that the strategy makes on its own, by multiply-adds and an eighth for a look-up; not
    ``balanced``: as if there were nothing but layers."""
    return tuple(stop - start for start, stop in _ranges(model, num_stages, balanced=balanced))


def mixtures_by_stage(model: GPTConfig, num_stages: int, *, balanced: bool = True) -> tuple[int, ...]:
    """How many of them are mixtures of experts."""
    first = model.num_layers - model.layers_with_experts
    return tuple(max(0, stop - max(start, first)) for start, stop in _ranges(model, num_stages, balanced=balanced))


@functools.lru_cache(maxsize=64)
def expert_parameters(model: GPTConfig, layout: ParallelLayout, *, balanced: bool = True) -> tuple[int, ...]:
    """Of ``stage_parameters`` those of experts, of which a rank has 1/e: what only the ranks with the same ones hold alike."""
    experts = experts_of(model)
    held = 0 if experts is None else experts.number // layout.expert_parallel_size * experts.parameters
    return tuple(count * held for count in mixtures_by_stage(model, layout.num_stages, balanced=balanced))


@functools.lru_cache(maxsize=256)
def _ranges(model: GPTConfig, num_stages: int, *, balanced: bool) -> tuple[tuple[int, int], ...]:
    if not balanced:
        return partition_layers([1.0] * model.num_layers, num_stages=num_stages, first_cost=0.0, last_cost=0.0)
    experts, table = experts_of(model), model.vocabulary_size * model.hidden_size
    first = model.num_layers - model.layers_with_experts
    costs = [float(matrix_elements(model, 1))] * first
    if experts is not None:
        router = experts.number * (model.hidden_size + experts.parameters)
        costs += [float(matrix_elements(model, 1, mixture=True) + router)] * model.layers_with_experts
    return partition_layers(
        costs, num_stages=num_stages, first_cost=(table + position_parameters(model)) / 8, last_cost=float(table)
    )
