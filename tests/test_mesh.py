"""The groups that a mesh makes really join the ranks that the layout names."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_ptdp.layout import ParallelLayout
from lightning_ptdp.mesh import ProcessMesh
from tests.pool import Pool


def _sum_of_ranks(rank: int, layout: ParallelLayout) -> dict[str, tuple[float, tuple[int, ...]]]:
    mesh = ProcessMesh.create(layout=layout, rank=rank)
    found = {}
    for axis in ("tensor", "context", "data", "replica_sum", "pipeline", "model", "embedding"):
        group = mesh.group(axis)
        value = torch.tensor([float(rank)])
        if group.size > 1:
            dist.all_reduce(value, group=group.handle)
        found[axis] = (value.item(), group.ranks)
    middle = tuple(range(1, layout.pipeline_parallel_size - 1))
    if middle:
        group = mesh.pipeline_subgroup(middle)
        assert (group is not None) == (mesh.group("pipeline").rank in middle)
    for (source, target, _), handle in mesh.channels.items():
        message = torch.tensor([float(source)])
        if rank == source:
            dist.send(message, target, group=handle)
        else:
            dist.recv(message, source, group=handle)
            assert message.item() == source
    return found


@pytest.mark.parametrize(("world_size", "t", "p", "c"), [(8, 2, 2, 1), (4, 1, 4, 1), (6, 2, 3, 1), (5, 1, 5, 1), (8, 2, 1, 2)])
def test_every_group_sums_over_its_ranks(world_size: int, t: int, p: int, c: int, pool: Pool) -> None:
    layout = ParallelLayout(world_size=world_size, tensor_parallel_size=t, pipeline_parallel_size=p, context_parallel_size=c)
    for found in pool.run(_sum_of_ranks, world_size=world_size, args=(layout,)):
        for total, ranks in found.values():
            assert total == sum(ranks)
