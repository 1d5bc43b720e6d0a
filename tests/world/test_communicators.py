"""Communicators of each rank, derived from the layout."""

from unittest import mock

import pytest
import torch.distributed as dist

from lightning_ptdp.world.communicators import channel_rounds, communicators
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh

pytestmark = pytest.mark.thorough

T8P8D8C2E8 = {
    "world_size": 1024,
    "tensor_parallel_size": 8,
    "pipeline_parallel_size": 8,
    "context_parallel_size": 2,
    "expert_parallel_size": 8,
}


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"world_size": 1}, {0}),
        ({"world_size": 8}, {2}),
        ({"world_size": 8, "tensor_parallel_size": 8}, {2}),
        ({"world_size": 8, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {7}),
        # The first and the last stage have two channels, other stages have four.
        ({"world_size": 8, "pipeline_parallel_size": 8}, {4, 6}),
        (T8P8D8C2E8, {12, 14}),
    ],
)
def test_number_of_communicators(options, numbers):
    layout = ParallelLayout(**options)
    some = range(0, layout.world_size, 31 if layout.world_size > 8 else 1)  # of every stage
    assert {len(communicators(layout, rank)) for rank in some} == numbers


def test_communicator_members_in_large_layout():
    every = communicators(ParallelLayout(**T8P8D8C2E8), 200)
    # world, t p e, t p c, d c, t, p, d, e, c, expert replicas, channels
    assert [len(ranks) for ranks in every] == [1024, 512, 128, 16, 8, 8, 8, 8, 2, 2, 2, 2, 2, 2]
    assert all(200 in ranks for ranks in every)


def _created(rank, layout):
    created = []
    new_group = dist.new_group

    def note(ranks, **options):
        created.append(tuple(ranks))
        return new_group(ranks, **options)

    with mock.patch.object(dist, "new_group", note):
        mesh = ProcessMesh.create(layout=layout, rank=rank)
        before = len(created)
        mesh.levels(("data", "context"), 2)
        # A thread reduces over two levels; with one rank in a node there is only one level.
        assert len(created) - before == (2 if layout.size("replica_sum") > 2 else 0)
    return created[:before]


@pytest.mark.parametrize(
    "options",
    [
        {"expert_parallel_size": 4},
        {"tensor_parallel_size": 2, "context_parallel_size": 2},
        {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "context_parallel_size": 2},
    ],
)
def test_mesh_creates_each_communicator_once(options, pool):
    layout = ParallelLayout(world_size=8, **options)
    ranks = pool.run(_created, world_size=8, args=(layout,))
    assert len({len(created) for created in ranks}) == 1, "torch counts the groups of each rank"
    for rank, created in enumerate(ranks):
        world, *others = communicators(layout, rank)
        assert len(world) == 8
        assert sorted(map(sorted, others)) == sorted(list(one) for one in created if len(one) > 1)
    assert len(channel_rounds(layout)) <= 4
