"""Layouts compared with brute force."""

import itertools

import pytest

from lightning_ptdp.world.layout import ParallelLayout
from tests.errors import raises_with

pytestmark = pytest.mark.pure

SIZES = [
    sizes
    for sizes in itertools.product((1, 2, 3), (1, 2, 4), (1, 2), (1, 2, 3))
    if sizes[0] * sizes[1] * sizes[2] <= 24
]


def brute_force(layout, *moving):
    """Return the sets of ranks that agree on every coordinate except ``moving``."""

    def fixed(rank):
        here = layout.coordinates(rank)
        return tuple(
            here[dim] for dim in ("pipeline", "data", "context", "tensor") if dim not in moving
        )

    ranks = range(layout.world_size)
    return {tuple(r for r in ranks if fixed(r) == fixed(rank)) for rank in ranks}


@pytest.mark.parametrize(("t", "p", "c", "d"), SIZES)
def test_groups_equal_brute_force(t, p, c, d):
    layout = ParallelLayout(
        world_size=t * p * c * d,
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        context_parallel_size=c,
    )
    assert layout.data_parallel_size == d
    expected = {
        "tensor": brute_force(layout, "tensor"),
        "context": brute_force(layout, "context"),
        "data": brute_force(layout, "data"),
        "pipeline": brute_force(layout, "pipeline"),
        "model": brute_force(layout, "pipeline", "context", "tensor"),
        "replicas": brute_force(layout, "data"),
        "replica_sum": brute_force(layout, "data", "context"),
        "shards": brute_force(layout, "pipeline", "tensor"),
    }
    for axis, groups in expected.items():
        assert {tuple(sorted(g)) for g in layout.groups(axis)} == groups, axis
    for axis in expected:
        members = [rank for group in layout.groups(axis) for rank in group]
        assert sorted(members) == list(range(layout.world_size))
        for group in layout.groups(axis):
            assert all(layout.group_of(axis, rank) == group for rank in group)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("placement", ["loop", "v"])
def test_every_stage_is_on_one_rank(p, placement):
    layout = ParallelLayout(
        world_size=p,
        pipeline_parallel_size=p,
        virtual_pipeline_size=2 if p > 1 else 1,
        placement=placement,
    )
    held = {stage: rank for rank in range(p) for stage in layout.stages_of(rank)}
    assert held == {stage: layout.rank_of_stage(stage) for stage in range(layout.num_stages)}
    assert all(list(layout.stages_of(rank)) == sorted(layout.stages_of(rank)) for rank in range(p))
    assert layout.last_stage_rank == (0 if placement == "v" else p - 1)


def test_v_placement_turns_at_last_rank():
    layout = ParallelLayout(
        world_size=4, pipeline_parallel_size=4, virtual_pipeline_size=2, placement="v"
    )
    assert [layout.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]


def test_tensor_parallel_is_innermost_and_pipeline_outermost():
    layout = ParallelLayout(world_size=8, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert layout.group_of("tensor", 4) == (4, 5)
    assert layout.group_of("data", 4) == (4, 6)
    assert layout.group_of("pipeline", 3) == (3, 7)
    assert layout.coordinates(6) == {"pipeline": 1, "data": 1, "context": 0, "tensor": 0}


@pytest.mark.parametrize("rank", range(24))
def test_rank_and_coordinates_are_inverse(rank):
    layout = ParallelLayout(
        world_size=24, tensor_parallel_size=2, pipeline_parallel_size=3, context_parallel_size=2
    )
    assert layout.rank(layout.coordinates(rank)) == rank


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (
            {"world_size": 6, "tensor_parallel_size": 4},
            ["world_size=6", "tensor_parallel_size", "4 or 8"],
        ),
        ({"world_size": 4, "pipeline_parallel_size": 3}, ["world_size=4", "3 or 6"]),
        ({"world_size": 0}, ["world_size=0", "positive"]),
        ({"world_size": 4, "tensor_parallel_size": 2.0}, ["tensor_parallel_size=2.0"]),
        (
            {"world_size": 4, "virtual_pipeline_size": 2},
            ["virtual_pipeline_size=2", "pipeline_parallel_size"],
        ),
        (
            {"world_size": 4, "sequence_parallel": True},
            ["sequence_parallel", "tensor_parallel_size"],
        ),
    ],
)
def test_impossible_layout_names_field_and_fix(kwargs, words):
    with raises_with(words):
        ParallelLayout(**kwargs)


def test_rank_outside_world_is_refused():
    with pytest.raises(ValueError, match="rank=8"):
        ParallelLayout(world_size=8).coordinates(8)
