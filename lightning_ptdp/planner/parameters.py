"""How many parameters a rank holds, by stage."""

from __future__ import annotations

import functools

from lightning_ptdp.models.gpt_config import GPTConfig
from lightning_ptdp.schedule.partition import partition_layers
from lightning_ptdp.world.layout import ParallelLayout

__all__ = ["heads_a_rank", "layer_matrices", "layer_parameters", "layers_by_stage", "stage_parameters"]


def heads_a_rank(model: GPTConfig, t: int) -> tuple[int, int]:
    """Heads of queries and of keys on one tensor-parallel rank; of fewer key heads than ranks, every rank has one."""
    return model.num_heads // t, max(1, model.kv_heads // t)


def layer_matrices(model: GPTConfig, t: int) -> int:
    """Elements of one layer's matrices on one tensor-parallel rank."""
    h, f = model.hidden_size, model.ffn_size // t
    heads, kv_heads = heads_a_rank(model, t)
    attention = (heads + 2 * kv_heads) * model.head_dim * h + heads * model.head_dim * h
    return attention + (2 if model.mlp == "gelu" else 3) * f * h


def layer_parameters(model: GPTConfig, t: int) -> int:
    """All parameters of one layer on one tensor-parallel rank."""
    h, f = model.hidden_size, model.ffn_size // t
    heads, kv_heads = heads_a_rank(model, t)
    up = f if model.mlp == "gelu" else 2 * f
    biases = (heads + 2 * kv_heads) * model.head_dim + h + up + h if model.bias else 0
    return layer_matrices(model, t) + biases + 2 * _norm(model)


@functools.lru_cache(maxsize=64)
def stage_parameters(model: GPTConfig, layout: ParallelLayout) -> tuple[int, ...]:
    """Parameters of each stage on one tensor-parallel rank, in the order of stages, the vocabulary padded.

    A tied head is a second copy where it is on another rank than the embedding.
    """
    t = layout.tensor_parallel_size
    table = -(-model.vocabulary_size // t) * model.hidden_size
    stages = [count * layer_parameters(model, t) for count in layers_by_stage(model, layout.num_stages)]
    stages[0] += table + (model.sequence_length * model.hidden_size if model.position == "learned" else 0)
    shared = model.tie_embeddings and layout.last_stage_rank == layout.rank_of_stage(0)
    stages[-1] += _norm(model) + (0 if shared else table)
    return tuple(stages)


@functools.lru_cache(maxsize=64)
def layers_by_stage(model: GPTConfig, num_stages: int) -> tuple[int, ...]:
    """How many layers each stage has: the split that the strategy makes on its own, by multiply-adds and an eighth for a look-up."""
    matrices, table = layer_matrices(model, 1), model.vocabulary_size * model.hidden_size
    positions = model.sequence_length * model.hidden_size if model.position == "learned" else 0
    return _split(model.num_layers, num_stages, (table + positions) / 8 / matrices, table / matrices)


@functools.lru_cache(maxsize=256)
def _split(num_layers: int, num_stages: int, first: float, last: float) -> tuple[int, ...]:
    ranges = partition_layers([1.0] * num_layers, num_stages=num_stages, first_cost=first, last_cost=last)
    return tuple(stop - start for start, stop in ranges)


def _norm(model: GPTConfig) -> int:
    return 2 * model.hidden_size if model.norm == "layer" and model.bias else model.hidden_size
