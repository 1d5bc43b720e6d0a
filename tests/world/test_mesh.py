"""Process groups of a mesh contain the ranks of the layout."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_ptdp.world.axes import SETS
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh


def _sum_of_ranks(rank, layout):
    mesh = ProcessMesh.create(layout=layout, rank=rank)
    found = {}
    for axis in ("tensor", "context", "data", "pipeline", *SETS):
        group = mesh.group(axis)
        value = torch.tensor([float(rank)])
        if group.size > 1:
            dist.all_reduce(value, group=group.handle)
        found[axis] = (value.item(), group.ranks)
    middle = tuple(range(1, layout.pipeline_parallel_size - 1))
    if middle:
        others = tuple(
            place for place in range(layout.pipeline_parallel_size) if place not in middle
        )
        places = middle if mesh.group("pipeline").rank in middle else others
        group = mesh.subgroup("pipeline", places)
        assert group.ranks == tuple(mesh.group("pipeline").ranks[place] for place in places)
        assert mesh.subgroup("pipeline", places) is group
    here, stages = mesh.group("pipeline"), layout.num_stages
    lines = {(layout.rank_of_stage(s), layout.rank_of_stage(s + 1)) for s in range(stages - 1)}
    wanted = {(a, b, "forward") for a, b in lines if a != b} | {
        (b, a, "backward") for a, b in lines if a != b
    }
    places = {
        (here.ranks.index(a), here.ranks.index(b), direction) for a, b, direction in mesh.channels
    }
    assert places == {line for line in wanted if here.rank in line[:2]}
    for (source, target, _), handle in mesh.channels.items():
        message = torch.tensor([float(source)])
        if rank == source:
            dist.send(message, target, group=handle)
        else:
            dist.recv(message, source, group=handle)
            assert message.item() == source
    return found


@pytest.mark.parametrize(
    ("world_size", "t", "p", "c", "v", "placement"),
    [
        (8, 2, 2, 1, 2, "loop"),
        (4, 1, 4, 1, 1, "loop"),
        (6, 2, 3, 1, 2, "v"),
        (5, 1, 5, 1, 2, "loop"),
        (4, 2, 2, 1, 2, "v"),
        (8, 2, 1, 2, 1, "loop"),
    ],
)
def test_every_group_sums_over_its_ranks(world_size, t, p, c, v, placement, pool):
    layout = ParallelLayout(
        world_size=world_size,
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        context_parallel_size=c,
        virtual_pipeline_size=v,
        placement=placement,
    )
    for found in pool.run(_sum_of_ranks, world_size=world_size, args=(layout,)):
        for total, ranks in found.values():
            assert total == sum(ranks)


def _options(rank, layout, channel_ctas, accepted=True):
    """Return NCCL's options by axis and ranks.

    The options are: high priority, thread blocks, and True if the timeout is that of the mesh."""
    given = {}
    new_group, default = dist.new_group, dist.ProcessGroupNCCL.Options().config.max_ctas

    def note(ranks, *, pg_options, group_desc, **others):
        if pg_options is None:
            assert len(ranks) == 1
            return new_group(ranks, **others)
        ctas = pg_options.config.max_ctas
        kept = pg_options._timeout == others["timeout"]
        given[group_desc, tuple(ranks)] = (
            pg_options.is_high_priority_stream,
            None if ctas == default else ctas,
            kept,
        )
        return new_group(ranks, **others)

    with (
        mock.patch.object(dist, "new_group", note),
        mock.patch.object(dist, "get_backend", return_value="nccl"),
        mock.patch("lightning_ptdp.world.mesh.accepts_max_ctas", return_value=accepted),
    ):
        mesh = ProcessMesh.create(
            layout=layout, rank=rank, timeout=timedelta(seconds=77), channel_ctas=channel_ctas
        )
        mesh.subgroup("pipeline", (mesh.group("pipeline").rank,))
    return given


@pytest.mark.skipif(
    not dist.is_nccl_available(), reason="torch was built without NCCL, whose options are looked at"
)
def test_groups_on_critical_path_have_high_priority(pool):
    layout = ParallelLayout(
        world_size=8, tensor_parallel_size=2, pipeline_parallel_size=2, context_parallel_size=2
    )
    for given in pool.run(_options, world_size=8, args=(layout, 6)):
        lanes = {axis: lane for (axis, ranks), lane in given.items() if len(ranks) > 1}
        assert lanes.pop("channel") == (True, 6, True)
        assert [lanes.pop(axis) for axis in ("tensor", "context")] == [(True, None, True)] * 2
        assert set(lanes) >= {"pipeline", "replica_sum"} and set(lanes.values()) == {
            (False, None, True)
        }


@pytest.mark.skipif(
    not dist.is_nccl_available(), reason="torch was built without NCCL, whose options are looked at"
)
@pytest.mark.parametrize(("accepted", "expected"), [(True, 4), (False, None)])
def test_channel_thread_blocks_are_limited_if_supported(pool, accepted, expected):
    layout = ParallelLayout(world_size=2, pipeline_parallel_size=2)
    for given in pool.run(_options, world_size=2, args=(layout, None, accepted)):
        ctas = {axis: lane[1] for (axis, ranks), lane in given.items() if len(ranks) > 1}
        assert ctas["channel"] == expected
        assert {*ctas.values()} <= {expected, None}
