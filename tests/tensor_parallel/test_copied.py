"""Key/value heads with copies on several ranks: slices, gradients and norms."""

import pytest
import torch
from torch import nn

from lightning_ptdp.data_parallel.buckets import GradientBuckets
from lightning_ptdp.data_parallel.gradient_store import UnbucketedGradients
from lightning_ptdp.data_parallel.gradient_sums import global_norm
from lightning_ptdp.data_parallel.reduction import Reduction
from lightning_ptdp.parameters.placement import slice_full
from lightning_ptdp.tensor_parallel import Column
from lightning_ptdp.tensor_parallel.tensor_shards import shard_columns
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh
from tests.data_parallel.managed import managed
from tests.tensor_parallel.toy import assemble_full

PARTS, HEADS = (16, 4, 4), (8, 2, 2)  # head size 2


@pytest.mark.parametrize(
    ("size", "copies"), [(1, (1, 1, 1)), (2, (1, 1, 1)), (4, (1, 2, 2)), (8, (1, 4, 4))]
)
@pytest.mark.parametrize("dim", [0, 1])
def test_rank_has_its_queries_and_their_kv_heads(size, copies, dim):
    kind = Column(parts=PARTS, heads=HEADS, copy_heads=True)
    assert kind.copies(size) == copies
    full = torch.arange(24.0 * 3).view(24, 3)
    full = full.t().contiguous() if dim else full
    shardings = [
        shard_columns(full.shape, parts=PARTS, size=size, index=i, copies=copies, dim=dim)
        for i in range(size)
    ]
    local = [slice_full(full, sharding) for sharding in shardings]
    for index, tensor in enumerate(local):
        q, k, v = (tensor.t() if dim else tensor).split(
            [16 // size, *(4 * c // size for c in copies[1:])]
        )
        rows = full.t() if dim else full
        assert torch.equal(q, rows[: PARTS[0]].chunk(size)[index])
        assert torch.equal(k, rows[16:20].chunk(size // copies[1])[index // copies[1]])
        assert torch.equal(v, rows[20:].chunk(size // copies[2])[index // copies[2]])
    assert torch.equal(assemble_full(local, shardings), full)
    counted = [
        part
        for tensor, sharding in zip(local, shardings, strict=True)
        for part in sharding.unrepeated(tensor)
    ]
    assert torch.equal(
        torch.cat([part.flatten() for part in counted]).sort().values, full.flatten().sort().values
    )


def check_gradients(rank):
    layout = ParallelLayout(world_size=4, tensor_parallel_size=4)
    mesh = ProcessMesh.create(layout=layout, rank=rank)
    group = mesh.subgroup("tensor", (rank // 2 * 2, rank // 2 * 2 + 1))
    assert mesh.subgroup("tensor", (0, 1, 2, 3)) is mesh.group("tensor")
    sharding = shard_columns((24,), parts=PARTS, size=4, index=rank, copies=(1, 2, 2))
    sums = tuple((piece.in_local, group) for piece in sharding.pieces if piece.copies > 1)
    expected = torch.tensor([1.0 + rank] * 4 + [(rank // 2 * 2) * 2 + 3.0] * 4)
    full_square = 4 * (1 + 4 + 9 + 16) + 4 * (9 + 49)
    for loose in (False, True):
        weight, unused = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
        both = managed([weight, unused], sums=sums)
        gradients = UnbucketedGradients(both) if loose else GradientBuckets(both, {(): Reduction()})
        gradients.begin(keep=False)
        (weight * (rank + 1)).sum().backward()
        gradients.finish(2.0)
        gradients.set_grad()
        assert torch.equal(weight.grad, 2 * expected), (rank, weight.grad)
        norm = global_norm(
            sharding.unrepeated(weight.grad), group=mesh.group("model"), device=torch.device("cpu")
        )
        torch.testing.assert_close(norm, torch.tensor(2 * full_square**0.5))


def test_gradients_of_copies_are_summed_and_counted_once(pool):
    pool.run(check_gradients, world_size=4)
