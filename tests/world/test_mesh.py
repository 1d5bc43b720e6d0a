"""The groups that a mesh makes really join the ranks that the layout names."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_ptdp.world.layout import SETS, ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh
from lightning_ptdp.world.placement import Placement
from tests.pool import Pool


def _sum_of_ranks(rank: int, layout: ParallelLayout) -> dict[str, tuple[float, tuple[int, ...]]]:
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
        others = tuple(place for place in range(layout.pipeline_parallel_size) if place not in middle)
        places = middle if mesh.group("pipeline").rank in middle else others
        group = mesh.subgroup("pipeline", places)
        assert group.ranks == tuple(mesh.group("pipeline").ranks[place] for place in places)
        assert mesh.subgroup("pipeline", places) is group
    here, stages = mesh.group("pipeline"), layout.num_stages
    lines = {(layout.rank_of_stage(s), layout.rank_of_stage(s + 1)) for s in range(stages - 1)}
    wanted = {(a, b, "forward") for a, b in lines if a != b} | {(b, a, "backward") for a, b in lines if a != b}
    places = {(here.ranks.index(a), here.ranks.index(b), direction) for a, b, direction in mesh.channels}
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
def test_every_group_sums_over_its_ranks(
    world_size: int, t: int, p: int, c: int, v: int, placement: Placement, pool: Pool
) -> None:
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
