"""Tests of layer partitioning: complete, optimal, and with errors that name the fix."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_ptdp.pipeline.containers import ModelParts, layer_ranges
from lightning_ptdp.schedule import check_num_layers, explicit_partition, partition_layers
from lightning_ptdp.world.layout import ParallelLayout
from tests.errors import raises_with

costs = st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, 1.5, 7.0]), min_size=1, max_size=9)


def counts(ranges):
    return [stop - start for start, stop in ranges]


def key(bounds, layers, first, last):
    """Return the sort key that the best split minimizes.

    It compares the largest stage, the evenness, the first and the last stage, and the boundaries,
    so that later stages get the remainder."""
    exact = [Fraction(str(cost)) for cost in layers]
    stages = [sum(exact[start:stop], Fraction(0)) for start, stop in pairwise(bounds)]
    stages[0] += Fraction(str(first))
    stages[-1] += Fraction(str(last))
    ends = stages[0] + (stages[-1] if len(stages) > 1 else 0)
    return (max(stages), sum(cost**2 for cost in stages), ends, *bounds)


@given(costs, st.data())
@settings(max_examples=200, deadline=None)
def test_partition_is_optimal(layers, data):
    num_stages = data.draw(st.integers(1, len(layers)))
    first, last = (data.draw(st.sampled_from([0.0, 0.5, 3.0])) for _ in range(2))
    ranges = partition_layers(layers, num_stages=num_stages, first_cost=first, last_cost=last)
    every = [
        (0, *cuts, len(layers)) for cuts in combinations(range(1, len(layers)), num_stages - 1)
    ]
    best = min(every, key=lambda bounds: key(bounds, layers, first, last))
    assert ranges == tuple(pairwise(best))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.data())
@settings(max_examples=200, deadline=None)
def test_partition_covers_all_layers(layers, data):
    num_stages = data.draw(st.integers(1, len(layers)))
    ends = data.draw(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)))
    ranges = partition_layers(layers, num_stages=num_stages, first_cost=ends[0], last_cost=ends[1])
    assert len(ranges) == num_stages
    assert all(start < stop for start, stop in ranges)
    assert [layer for start, stop in ranges for layer in range(start, stop)] == list(
        range(len(layers))
    )


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [
        (12, 4, [3, 3, 3, 3]),
        (10, 4, [2, 3, 3, 2]),
        (9, 4, [2, 2, 3, 2]),
        (11, 4, [2, 3, 3, 3]),
        (4, 4, [1, 1, 1, 1]),
        (5, 2, [2, 3]),
        (7, 6, [1, 1, 1, 1, 2, 1]),
        (105, 35, [3] * 35),
    ],
)
def test_remainder_layers_prefer_inner_stages(num_layers, num_stages, expected):
    # 0.1 is not exact in binary, but ties must still be found.
    for cost in (1, 0.1):
        assert counts(partition_layers([cost] * num_layers, num_stages=num_stages)) == expected


def test_partition_accounts_for_embedding_and_head():
    assert counts(partition_layers([1] * 8, num_stages=4, last_cost=1)) == [2, 2, 3, 1]
    assert counts(partition_layers([1] * 8, num_stages=4, first_cost=1, last_cost=1)) == [
        1,
        3,
        3,
        1,
    ]
    assert counts(partition_layers([1] * 8, num_stages=2, last_cost=100)) == [7, 1]
    assert partition_layers([1, 2], num_stages=1, first_cost=5, last_cost=5) == ((0, 2),)


def names(num_layers):
    return [f"model.blocks.{index}" for index in range(num_layers)]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 3))
def test_explicit_partition_by_counts_or_names(wanted, depth):
    layers = names(sum(wanted))
    ranges = explicit_partition(wanted, layers=layers, num_stages=len(wanted))
    assert counts(ranges) == wanted
    assert [layer for start, stop in ranges for layer in range(start, stop)] == list(
        range(len(layers))
    )
    first = [".".join(layers[start].split(".")[-depth:]) for start, _ in ranges]
    assert explicit_partition(first, layers=layers, num_stages=len(wanted)) == ranges


def test_layer_name_components_match_exactly():
    layers = ["h.a1", "h.1", "h.11", "h.21"]
    assert explicit_partition(["a1", "11", "21"], layers=layers, num_stages=3) == (
        (0, 2),
        (2, 3),
        (3, 4),
    )
    assert explicit_partition(("h.a1", "1"), layers=layers, num_stages=2) == ((0, 1), (1, 4))


def test_ambiguous_layer_name_is_refused():
    layers = ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]
    with pytest.raises(ValueError, match=r"'encoder.block.1' or 'decoder.block.1'. Write the full"):
        explicit_partition(["encoder.block.0", "block.1"], layers=layers, num_stages=2)
    whole = ["encoder.block.0", "decoder.block.1"]
    assert explicit_partition(whole, layers=layers, num_stages=2) == ((0, 3), (3, 4))


@pytest.mark.parametrize(
    ("partition", "num_layers", "words"),
    [
        ([1, 2], 3, ["partition=[1, 2]", "num_stages=3", "one entry per stage"]),
        ([1, 0, 2], 3, ["has 0", "at least one"]),
        ([1, True, 2], 4, ["has True"]),
        ([1, 2, 2], 6, ["sum to 5", "num_layers=6", "Add 1"]),
        ([1, 2, 5], 6, ["sum to 8", "Remove 2"]),
        (["0", 2, 1], 4, ["mixes numbers and names"]),
        (["blocks.0", "blocks.3"], 6, ["['blocks.0', 'blocks.3'] has 2 entries", "num_stages=3"]),
        (
            ["blocks.0", "block.2", "blocks.3"],
            6,
            ["'block.2', which is not a layer", "nearest: blocks.2", "'model.blocks.5'"],
        ),
        (
            ["0", "2", "6"],
            6,
            ["'6', which is not a layer", "the 6 layers are 'model.blocks.0' to 'model.blocks.5'"],
        ),
        (
            ["blocks.1", "blocks.3", "blocks.4"],
            6,
            ["starts with layer 'model.blocks.1'", "Start with 'model.blocks.0'"],
        ),
        (["0", "4", "2"], 6, ["out of order", "stage 2 starts with '2'", "after '4'"]),
        (["0", "2", "blocks.2"], 6, ["out of order", "stage 2 starts with 'blocks.2'"]),
    ],
)
def test_invalid_explicit_partition_is_refused(partition, num_layers, words):
    with raises_with(words):
        explicit_partition(partition, layers=names(num_layers), num_stages=3)


class Model(nn.Module):
    """Eight layers of 8 x 64 elements between an embedding and a head of ``vocabulary`` x 8."""

    def __init__(self, *, vocabulary: int = 8, layers: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, 8)
        self.blocks = nn.ModuleList(layers or [nn.Linear(8, 64) for _ in range(8)])
        self.head = nn.Linear(8, vocabulary, bias=False)


PARTS = ModelParts(blocks=("blocks",), before=("wte",), after=("head",))


def ranges_of(model, p, **options):
    layout = ParallelLayout(world_size=p, pipeline_parallel_size=p)
    return layer_ranges(model, parts=PARTS, layout=layout, **options)


@pytest.mark.parametrize(
    ("vocabulary", "expected"),
    [
        (8, [2, 2, 2, 2]),
        (64, [2, 2, 3, 1]),  # the head costs one layer
        # the head costs four layers and the embedding half a layer, too little to move one off the
        # first stage
        (
            256,
            [2, 2, 3, 1],
        ),
        (512, [1, 3, 3, 1]),  # the embedding costs one layer
    ],
)
def test_embedding_costs_one_eighth_of_head(vocabulary, expected):
    with torch.device("meta"):
        model = Model(vocabulary=vocabulary)
    assert counts(ranges_of(model, 4)) == expected
    assert ranges_of(model, 4, partition=["0", "blocks.1", "2", "blocks.7"])[2] == (2, 7)


def test_only_active_experts_count_as_cost():
    mixture = nn.Module()
    mixture.top_k, mixture.experts = 2, nn.Module()
    mixture.experts.num_experts = 16
    mixture.experts.up = nn.Parameter(torch.empty(16, 8, 64, device="meta"))
    dense = [nn.Linear(8, 64) for _ in range(4)]
    assert counts(ranges_of(Model(layers=[*dense, mixture, mixture]), 2)) == [4, 2]


def test_repeated_layer_counts_each_time():
    assert ranges_of(Model(layers=[nn.Linear(8, 64)] * 4), 2) == ((0, 2), (2, 4))


@pytest.mark.parametrize(
    ("num_layers", "p", "v", "words"),
    [
        (
            6,
            4,
            2,
            [
                "num_layers=6",
                "4 * 2 = 8",
                "at least 8 layers",
                "virtual_pipeline_size=1",
                "pipeline_parallel_size=3",
            ],
        ),
        (3, 4, 2, ["at least 8 layers", "pipeline_parallel_size=3 with virtual_pipeline_size=1"]),
        (3, 4, 1, ["4 * 1 = 4", "at least 4 layers", "pipeline_parallel_size=3"]),
        (7, 3, 3, ["virtual_pipeline_size=2", "pipeline_parallel_size=2"]),
        (1, 2, 1, ["pipeline_parallel_size=1"]),
    ],
)
def test_too_few_layers_are_refused(num_layers, p, v, words):
    check_num_layers(p * v, pipeline_parallel_size=p, virtual_pipeline_size=v)
    with raises_with(words):
        check_num_layers(num_layers, pipeline_parallel_size=p, virtual_pipeline_size=v)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"costs": [1, 1], "num_stages": 3}, ["num_layers=2", "num_stages=3", "at most 2 stages"]),
        ({"costs": [1, -1], "num_stages": 1}, ["costs has the cost -1"]),
        (
            {"costs": [1], "num_stages": 1, "last_cost": float("inf")},
            ["last_cost has the cost inf"],
        ),
        ({"costs": [1], "num_stages": 0}, ["num_stages=0"]),
    ],
)
def test_invalid_costs_are_refused(kwargs, words):
    with raises_with(words):
        partition_layers(kwargs.pop("costs"), **kwargs)
