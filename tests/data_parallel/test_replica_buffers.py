"""Buffers of unusual kinds, broadcast from the first replica."""

import torch
from torch import nn

from lightning_ptdp.data_parallel import ReplicaBuffers
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh


class Statistics(nn.Module):
    """A constant that is expanded, and statistics, one of which begins as a constant."""

    def __init__(self):
        super().__init__()
        self.register_buffer("constant", torch.arange(3.0).expand(4, 3))
        self.register_buffer("total", torch.zeros(3).expand(4, 3))
        self.register_buffer("best", torch.tensor(0.0))
        self.register_buffer("mean", torch.zeros(2, 3))


def _broadcast(rank):
    mesh = ProcessMesh.create(layout=ParallelLayout(world_size=2), rank=rank)
    module = Statistics()
    buffers = ReplicaBuffers(module, mesh.group("replica_sum"))
    with torch.inference_mode():  # as in a validation with NCCL
        module.best = module.best + rank + 1
    module.total = module.total + rank + 1
    module.mean = torch.full((1, 3), rank + 1.0).expand(2, 3)
    buffers.broadcast()
    with torch.inference_mode():
        buffers.broadcast()
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def test_tensors_that_cannot_be_written_are_replaced(pool):
    first, other = pool.run(_broadcast, world_size=2)
    assert first["best"] == other["best"] == 1
    assert first["mean"].tolist() == other["mean"].tolist() == [[1.0] * 3] * 2
    assert other["total"].tolist() == [[1.0] * 3] * 4
    assert other["constant"].tolist() == [[0.0, 1.0, 2.0]] * 4
