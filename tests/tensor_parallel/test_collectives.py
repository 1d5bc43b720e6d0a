"""Differentiable collectives, against the same arithmetic in a single process."""

import pytest
import torch

from lightning_ptdp.tensor_parallel import collectives
from lightning_ptdp.world.mesh import Group
from tests.tensor_parallel.toy import assert_same, counted_collectives, own_slice, tensor_group


def everyones(group, *shape, dtype, seed):
    """Return one tensor per rank, equal on all ranks. Small integers make bfloat16 sums exact."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, shape, generator=generator).to(dtype) for _ in range(group.size)]


def check_all(rank):
    group = tensor_group(rank)
    t = group.size
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for dim in (0, 1, 2):
            shape = [2, 3, 5]
            shape[dim] = 4 * t
            xs, gs = (
                everyones(group, *shape, dtype=dtype, seed=1),
                everyones(group, *shape, dtype=dtype, seed=2),
            )
            narrow = list(shape)
            narrow[dim] = 4
            small_xs = everyones(group, *narrow, dtype=dtype, seed=3)
            small_gs = everyones(group, *narrow, dtype=dtype, seed=4)

            def run(function, x, grad):
                x = x.clone().requires_grad_()
                y = function(x)
                kept = x.detach().clone()
                y.backward(grad)
                assert_same(x.detach(), kept)
                return y.detach(), x.grad

            y, grad = run(lambda x: collectives.copy(x, group), xs[rank], gs[rank])
            assert_same(y, xs[rank])
            assert_same(grad, sum(gs))
            y, grad = run(lambda x: collectives.reduce(x, group), xs[rank], gs[rank])
            assert_same(y, sum(xs))
            assert_same(grad, gs[rank])
            y, grad = run(
                lambda x, dim=dim: collectives.gather_sequence(x, group, dim),
                small_xs[rank],
                gs[rank],
            )
            assert_same(y, torch.cat(small_xs, dim))
            assert_same(grad, own_slice(sum(gs), group, dim))
            y, grad = run(
                lambda x, dim=dim: collectives.scatter_sequence(x, group, dim),
                xs[rank],
                small_gs[rank],
            )
            assert_same(y, own_slice(sum(xs), group, dim))
            assert_same(grad, torch.cat(small_gs, dim))
            y, grad = run(
                lambda x, dim=dim: collectives.split_sequence(x, group, dim), xs[0], small_gs[rank]
            )
            assert_same(y, own_slice(xs[0], group, dim))
            assert_same(grad, torch.cat(small_gs, dim))
            if dim == 2:
                y, grad = run(lambda x: collectives.gather_last(x, group), small_xs[rank], gs[0])
                assert_same(y, torch.cat(small_xs, -1))
                assert_same(grad, own_slice(gs[0], group, -1))


def check_shared_values_survive(rank):
    group = tensor_group(rank)
    # exp saves its output for the backward pass. A reduction in place would corrupt it.
    x = torch.full((2, 3), 0.5, dtype=torch.float64, requires_grad=True)
    collectives.reduce(x.exp(), group).sum().backward()
    assert_same(x.grad, x.detach().exp())
    # Both branches of a sum get the same gradient tensor. A reduction in place would corrupt the
    # other branch.
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    (collectives.copy(a, group) + b).backward(torch.ones(2))
    assert_same(a.grad, torch.full((2,), float(group.size)))
    assert_same(b.grad, torch.ones(2))
    for length in (4 * group.size + 1, 1):
        with pytest.raises(
            ValueError, match=f"length {length} .*tensor_parallel_size={group.size}"
        ):
            collectives.scatter_sequence(torch.zeros(2, length, 3), group)


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_match_single_process(pool, size):
    pool.run(check_all, world_size=size)
    pool.run(check_shared_values_survive, world_size=size)


def test_group_of_one_does_not_communicate():
    x = torch.randn(2, 3, 4)
    with counted_collectives() as counts:
        for function in (
            collectives.copy,
            collectives.reduce,
            collectives.gather_sequence,
            collectives.scatter_sequence,
            collectives.split_sequence,
            collectives.gather_last,
        ):
            assert function(x, Group()) is x
    assert not counts
