"""How many parameters a rank holds, by stage."""

from __future__ import annotations

import functools

from lightning_ptdp.models.config import GPTConfig
from lightning_ptdp.models.size import layer_matrices, layer_parameters, norm_parameters, position_parameters
from lightning_ptdp.schedule.partition import partition_layers
from lightning_ptdp.world.layout import ParallelLayout

__all__ = ["layer_parameters", "layers_by_stage", "matrix_elements", "stage_parameters"]


def matrix_elements(model: GPTConfig, t: int) -> int:
    """Elements of one layer's matrices on one tensor-parallel rank."""
    return sum(outputs * inputs for outputs, inputs in layer_matrices(model, t))


@functools.lru_cache(maxsize=64)
def stage_parameters(model: GPTConfig, layout: ParallelLayout, *, balanced: bool = True) -> tuple[int, ...]:
    """Parameters of each stage on one tensor-parallel rank, in the order of stages, the vocabulary padded; ``balanced`` as of
    ``layers_by_stage``.

    A tied head is a second copy where it is on another rank than the embedding.
    """
    t = layout.tensor_parallel_size
    table = -(-model.vocabulary_size // t) * model.hidden_size
    stages = [count * layer_parameters(model, t) for count in layers_by_stage(model, layout.num_stages, balanced=balanced)]
    stages[0] += table + position_parameters(model)
    shared = model.tie_embeddings and layout.last_stage_rank == layout.rank_of_stage(0)
    stages[-1] += norm_parameters(model) + (0 if shared else table)
    return tuple(stages)


@functools.lru_cache(maxsize=64)
def layers_by_stage(model: GPTConfig, num_stages: int, *, balanced: bool = True) -> tuple[int, ...]:
    """How many layers each stage has: the split that the strategy makes on its own, by multiply-adds and an eighth for a look-up; not
    ``balanced``: as if there were nothing but layers."""
    if not balanced:
        return _split(model.num_layers, num_stages, 0.0, 0.0)
    matrices, table = matrix_elements(model, 1), model.vocabulary_size * model.hidden_size
    return _split(model.num_layers, num_stages, (table + position_parameters(model)) / 8 / matrices, table / matrices)


@functools.lru_cache(maxsize=256)
def _split(num_layers: int, num_stages: int, first: float, last: float) -> tuple[int, ...]:
    ranges = partition_layers([1.0] * num_layers, num_stages=num_stages, first_cost=first, last_cost=last)
    return tuple(stop - start for start, stop in ranges)
