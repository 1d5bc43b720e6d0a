"""Gradient buckets and their reductions over replicas."""

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ptdp.data_parallel.bucket import GradientState
from lightning_ptdp.data_parallel.buckets import GradientBuckets
from lightning_ptdp.data_parallel.gradient_store import UnbucketedGradients
from lightning_ptdp.data_parallel.gradient_sums import global_norm
from lightning_ptdp.data_parallel.overlapped_reduction import OverlappedReduction
from lightning_ptdp.data_parallel.reduction import PendingReduction, Reduction
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import Group, ProcessMesh
from tests.data_parallel.managed import managed


def _model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2), nn.Linear(3, 3)
    )


def _loss(model, x):
    return model[:5](x).square().mean()  # the last layer is not used


def _sum_over_replicas(rank, bucket_bytes, batches):
    model, reference = _model(), _model()
    inputs = [
        [torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * b + r)) for r in range(2)]
        for b in range(batches)
    ]
    buckets = GradientBuckets(
        managed(model.parameters()),
        {(): Reduction(inner=Group(dist.group.WORLD, (0, 1), rank))},
        bucket_bytes=bucket_bytes,
    )
    buckets.begin(keep=False)
    for index, batch in enumerate(inputs):
        if index == batches - 1:
            buckets.expect(0)
        _loss(model, batch[rank]).backward()
    buckets.reduce(0)
    buckets.finish(scale=0.5)
    (sum(_loss(reference, x) for batch in inputs for x in batch) * 0.5).backward()
    differences = []
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None
        expected = theirs.grad if theirs.grad is not None else torch.zeros_like(theirs)
        differences.append((mine.grad - expected).abs().max().item())
    buckets.unset_grad()
    assert all(p.grad is None for p in model.parameters())
    buckets.set_grad()
    assert sum(p.grad.abs().sum().item() for p in model.parameters()) > 0, (
        "unset_grad() lost the gradients"
    )
    return max(differences)


@pytest.mark.parametrize("bucket_bytes", [1, 200, 2**20])
@pytest.mark.parametrize("batches", [1, 3])
def test_reduced_gradients_equal_single_process(bucket_bytes, batches, pool):
    for difference in pool.run(_sum_over_replicas, world_size=2, args=(bucket_bytes, batches)):
        assert difference < 1e-6


@pytest.mark.parametrize("loose", [False, True])
def test_gradient_weight_applies_per_batch(loose):
    weight = nn.Parameter(torch.ones(3))
    one = managed([weight])
    buckets = UnbucketedGradients(one) if loose else GradientBuckets(one, {(): Reduction()})
    buckets.begin(keep=False)
    (weight * 2).sum().backward()
    buckets.weigh(10.0, last=False)
    assert buckets.has_weighed
    buckets.begin(keep=True)
    (weight * 3).sum().backward()
    buckets.weigh(100.0, last=True)
    buckets.finish()
    assert weight.grad.tolist() == [320.0] * 3
    assert not buckets.has_weighed


def _sum_after_all_batches(rank):
    """Reduce a parameter of one stage and one of two stages (tied weights on a rank of a V)."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    layout = ParallelLayout(world_size=2)
    reduction = Reduction(inner=ProcessMesh.create(layout=layout, rank=rank).group("replica_sum"))
    of_one, of_two = managed(parameters[:1]), managed(parameters[1:], stages=(0, 1))
    buckets = GradientBuckets([*of_one, *of_two], {(): reduction})
    buckets.begin(keep=False)
    for _ in range(2):
        sum((parameter * (rank + 1.0)).sum() for parameter in parameters).backward()
    buckets.finish()
    return [parameter.grad.tolist() for parameter in parameters]


def test_every_parameter_is_reduced_once(pool):
    assert pool.run(_sum_after_all_batches, world_size=2) == [[[6.0, 6.0], [6.0, 6.0]]] * 2


def test_unbucketed_gradients_accumulate_and_reset():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    gradients = UnbucketedGradients(managed([used, unused]))
    for batch in range(2):  # accumulated
        gradients.set_grad()
        gradients.begin(keep=batch > 0)
        (used * 3).sum().backward()
        if batch:
            gradients.finish()
        gradients.unset_grad()
        assert used.grad is None
    gradients.set_grad()
    assert (used.grad.tolist(), unused.grad) == ([6.0, 6.0], None)
    gradients.begin(keep=False)
    assert used.grad is None


@pytest.mark.parametrize("loose", [False, True])
def test_gradient_state_out_of_order_is_refused(loose):
    weight = nn.Parameter(torch.ones(3))
    one = managed([weight])
    gradients = UnbucketedGradients(one) if loose else GradientBuckets(one, {(): Reduction()})
    with pytest.raises(AssertionError, match="from EMPTY to REDUCING"):
        gradients.finish()
    for keep in (False, True):
        gradients.begin(keep=keep)
        (weight * 2).sum().backward()
    gradients.finish()
    assert weight.grad is not None and weight.grad.tolist() == [4.0] * 3
    with pytest.raises(AssertionError, match="from REDUCED to ACCUMULATING"):
        gradients.begin(keep=True)  # the earlier batches would be summed twice
    gradients.begin(keep=False)
    gradients.close()


def _norm(rank):
    gradients = [torch.full((4,), float(rank + 1))] if rank < 2 else []
    return float(
        global_norm(
            gradients, group=Group(dist.group.WORLD, (0, 1, 2), rank), device=torch.device("cpu")
        )
    )


def test_global_norm_is_equal_on_all_ranks(pool):
    assert pool.run(_norm, world_size=3) == pytest.approx([(4 * 1 + 4 * 4) ** 0.5] * 3)


def _goes_ahead(rank, nodes, scatter):
    """Run the backward of the last rank after all other ranks have finished theirs."""
    last = dist.get_world_size() - 1
    mesh = ProcessMesh.create(
        layout=ParallelLayout(world_size=last + 1), rank=rank, timeout=timedelta(seconds=8)
    )
    inner, outer = mesh.levels(("data",), nodes)
    reduction = Reduction(inner=inner, outer=outer, scatter=scatter, dtype=torch.float64)
    model, token = _model()[:5], torch.zeros(1)
    buckets = GradientBuckets(managed(model.parameters()), {(): reduction}, bucket_bytes=1)
    assert buckets.scatters is scatter
    buckets.begin(keep=False)
    loss = model(torch.full((3, 4), rank + 1.0)).sum()
    buckets.expect(0)
    for other in range(last) if rank == last else ():
        dist.recv(token, other)
    loss.backward()
    assert all(bucket.state is GradientState.REDUCING for bucket in buckets.buckets())
    if rank != last:
        dist.send(token, last)
    buckets.finish()
    total = torch.stack([bucket.mine().sum() for bucket in buckets.buckets()]).sum()
    buckets.close()
    return float(total)


@pytest.mark.parametrize(("nodes", "scatter"), [(1, False), (1, True), (2, False), (2, True)])
def test_backward_does_not_wait_for_reductions(nodes, scatter, pool):
    size = 2 * nodes
    totals = pool.run(_goes_ahead, world_size=size, args=(nodes, scatter))
    model = _model()
    sum(model[:5](torch.full((3, 4), rank + 1.0)).sum() for rank in range(size)).backward()
    expected = float(sum(p.grad.sum() for p in model.parameters() if p.grad is not None))
    found = sum(totals) / nodes if scatter else totals[0]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("size", "mebibytes"), [(1, 25), (2, 25), (6, 25), (8, 32), (64, 256)])
def test_bucket_size_grows_with_group_size(size, mebibytes):
    inner = Group(None, tuple(range(size)), 0)
    assert Reduction(inner=inner).bucket_bytes == mebibytes * 2**20
    assert (
        Reduction(inner=Group(None, (0, 1), 0), outer=inner).bucket_bytes
        == max(25, 8 * size) * 2**20
    )


@pytest.mark.parametrize("widen", [False, True])
def test_bucket_size_limit_uses_gradient_dtype(widen):
    parameters = [nn.Parameter(torch.zeros(64, dtype=torch.bfloat16)) for _ in range(16)]
    buckets = GradientBuckets(
        managed(parameters), {(): Reduction()}, bucket_bytes=1024, widen=widen
    )
    assert [bucket.buffer.nbytes for bucket in buckets.buckets()] == [1024] * (4 if widen else 2)


def test_adjacent_gradients_of_bucket_are_clipped_as_one():
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((5, 7), (3,), (64,), (2, 2))]
    buckets = GradientBuckets(managed(parameters), {(): Reduction()})
    buckets.begin(keep=False)
    (bucket,) = buckets.buckets()
    for parameter in parameters:
        parameter.grad.normal_()
    foreign = torch.randn(4)
    every = [parameter.grad for parameter in parameters if parameter.grad is not None]
    whole, other = sorted(buckets.joined([*every, foreign]), key=Tensor.numel, reverse=True)
    assert other is foreign
    assert whole.data_ptr() == bucket.buffer.data_ptr() and whole.numel() == bucket.buffer.numel()
    assert len(buckets.joined(every[:1] + every[2:])) == 2, "an omitted gradient must not be joined"
    part = every[0][1:4]  # as of a matrix of which other ranks hold parts too
    assert [x.tolist() for x in buckets.joined([part])] == [part.flatten().tolist()]
    expected = nn.utils.get_total_norm(every)
    assert float(
        global_norm(buckets.joined(every), group=Group(), device=torch.device("cpu"))
    ) == pytest.approx(float(expected))


def test_norm_of_large_gradient_is_accurate():
    gradient = torch.randn(2**22, generator=torch.Generator().manual_seed(0))
    found = global_norm([gradient], group=Group(), device=torch.device("cpu"))
    assert float(found) == pytest.approx(float(gradient.double().norm()), rel=1e-6)


def test_wait_error_is_raised_by_join():
    class Broken:
        def wait(self):
            raise RuntimeError("the other end is gone")

    def steps():
        yield Broken()
        raise AssertionError("nothing is asked for behind what failed")

    beside = OverlappedReduction(torch.device("cpu"))
    for _ in range(2):
        beside.launch(PendingReduction(steps()), shares=False)
    with pytest.raises(RuntimeError, match="the other end is gone"):
        beside.join()
    beside.close()


def test_done_callbacks_run_in_launch_order():
    seen = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self):
            seen.append(self.name)

    beside = OverlappedReduction(torch.device("cpu"))
    for chain in ("a", "b"):
        pending = PendingReduction(iter([Noted(f"{chain}1"), Noted(f"{chain}2")]))
        pending.when_done(partial(seen.append, f"end of {chain}"))
        beside.launch(pending, shares=False)
    beside.join()
    beside.close()
    assert sorted(seen) == ["a1", "a2", "b1", "b2", "end of a", "end of b"]
    assert [text for text in seen if "end" in text] == ["end of a", "end of b"]
    assert all(seen.index(f"{chain}2") + 1 == seen.index(f"end of {chain}") for chain in "ab")


def test_only_sharded_gradients_accumulate_after_a_sum():
    assert GradientState.ADDING.to(GradientState.ACCUMULATING) is GradientState.ACCUMULATING
    with pytest.raises(AssertionError, match="from REDUCING to ACCUMULATING"):
        GradientState.REDUCING.to(GradientState.ACCUMULATING)
