"""Sharded optimizers: equal steps, kept groups and schedulers, bytes per parameter."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel.buckets import GradientBuckets
from lightning_ptdp.data_parallel.optimizer_parameters import OptimizerParameters
from lightning_ptdp.data_parallel.reduction import Reduction
from lightning_ptdp.parameters.placement import range_rectangles
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import Group, ProcessMesh
from tests.data_parallel.managed import managed
from tests.data_parallel.optimizers import OPTIMIZERS

pytestmark = pytest.mark.thorough


def _model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 2)
    ).to(dtype)


def _groups(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def _sharded(model, group, **options):
    reduction = Reduction(inner=group, scatter=True, **options)
    buckets = GradientBuckets(managed(model.parameters()), {(): reduction}, bucket_bytes=3000)
    return buckets, OptimizerParameters(buckets, config=PTDPConfig())


def _inputs(step, rank):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def _difference(rank, name, size):
    model, reference = _model(), _model()
    buckets, stepped = _sharded(model, Group(dist.group.WORLD, tuple(range(size)), rank))
    optimizer, plain = OPTIMIZERS[name](_groups(model)), OPTIMIZERS[name](_groups(reference))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, plain)]
    stepped.adopt(optimizer)
    for step in range(4):
        buckets.begin(keep=False)
        buckets.expect(0)
        model(_inputs(step, rank)).square().mean().backward()
        buckets.reduce(0)
        buckets.finish(scale=1 / size)
        stepped.set_grad()
        assert all(p.grad is None for p in model.parameters()), (
            "a parameter still has the gradient of one replica"
        )
        optimizer.step()
        stepped.publish()
        plain.zero_grad()
        sum(reference(_inputs(step, r)).square().mean() / size for r in range(size)).backward()
        plain.step()
        for scheduler in schedulers:
            scheduler.step()
        stepped.wait()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(
        float(plain.param_groups[0]["lr"])
    )
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    return max(
        float((a - b).abs().max())
        for a, b in zip(model.parameters(), reference.parameters(), strict=True)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_optimizer_step_equals_unsharded(name, pool):
    for difference in pool.run(_difference, world_size=3, args=(name, 3)):
        assert difference < 2e-6


def _bytes(rank, size, shard):
    """Return this rank's bytes of bf16 AdamW training, the number of parameters, and of the buckets
    that waited for gradients at the start of a sum."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(200, 200, dtype=torch.bfloat16) for _ in range(4)))
    group = Group(dist.group.WORLD if size > 1 else None, tuple(range(size)), rank)
    reduction = Reduction(inner=group, scatter=shard != "none")
    waiting = []
    buckets = GradientBuckets(
        managed(model.parameters()),
        {(): reduction},
        bucket_bytes=200_000,
        shards=shard == "gradients",
        launched=lambda *_: waiting.append(
            sum(bucket.unsummed is not None for bucket in buckets.buckets())
        ),
    )
    assert sum(1 for _ in buckets.buckets()) == 4
    stepped = OptimizerParameters(buckets, config=PTDPConfig())
    optimizer = torch.optim.AdamW(model.parameters())
    stepped.adopt(optimizer)
    buckets.begin(keep=False)
    buckets.expect(0)
    model(torch.ones(2, 200, dtype=torch.bfloat16)).sum().backward()
    buckets.finish()
    stepped.set_grad()
    optimizer.step()
    stepped.publish()
    stepped.wait()
    held = [*model.parameters(), *(bucket.buffer for bucket in buckets.buckets())]
    held += [value for group in optimizer.param_groups for value in group["params"]]
    held += [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in held
    }
    parameters = sum(p.numel() for p in model.parameters())
    return sum(storages.values()), parameters, max(waiting, default=0)


@pytest.mark.parametrize(
    ("size", "shard", "expected"),
    [
        (1, "none", 18),
        (2, "none", 18),
        (2, "optimizer", 6 + 12 / 2),
        (4, "optimizer", 6 + 12 / 4),
        (2, "gradients", 2 + 16 / 2),
        (4, "gradients", 2 + 16 / 4),
    ],
)
def test_bytes_per_parameter_follow_formula(size, shard, expected, pool):
    for held, parameters, waiting in pool.run(_bytes, world_size=size, args=(size, shard)):
        assert held / parameters == pytest.approx(expected, rel=0.02)
        assert waiting <= 1, "gradients of several buckets waited for their sum"


def _two_levels(rank, scatter, compress):
    """Return the largest difference from the flat sum, and the largest value of the flat sum."""
    mesh = ProcessMesh.create(layout=ParallelLayout(world_size=4), rank=rank)
    inner, outer = mesh.levels(("data",), 2)
    reduction = Reduction(
        inner=inner, outer=outer, scatter=scatter, outer_dtype=torch.bfloat16 if compress else None
    )
    buffers = [torch.randn(64, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    mine, total = buffers[rank].clone(), sum(buffers)
    reduction.prepare(mine).wait()
    found, wanted = reduction.mine(mine), reduction.mine(total)
    assert found.numel() == (32 if scatter else 64)
    if scatter:
        reduction.start_gather(mine).wait()
        found, wanted = mine, total
    return float((found - wanted).abs().max()), float(wanted.abs().max())


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("compress", [False, True])
def test_two_level_reduction_equals_flat_sum(scatter, compress, pool):
    for difference, largest in pool.run(_two_levels, world_size=4, args=(scatter, compress)):
        assert difference < (largest * 2**-7 if compress else 2e-6)
        assert not compress or difference > 1e-5


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
)
def test_rectangles_cover_range_once(shape, cut):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start, stop = (round(part * whole.numel()) for part in cut)
    flat = whole.flatten()[start:stop]
    rectangles = list(range_rectangles(shape, start, stop))
    seen = []
    for rectangle in rectangles:
        seen += whole[rectangle.slices].flatten().tolist()
    assert seen == flat.tolist()
    assert len(rectangles) <= max(1, 2 * len(shape) - 1)
