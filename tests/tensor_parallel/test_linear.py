"""Column and row layers against ``nn.Linear`` in a single process: output, gradients and
collectives."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from lightning_ptdp.tensor_parallel import (
    Column,
    ColumnParallelLinear,
    Row,
    RowParallelLinear,
    shard_module,
)
from lightning_ptdp.tensor_parallel.kinds import ModulePlace
from lightning_ptdp.world.mesh import Group
from tests.tensor_parallel.toy import (
    assert_gradients,
    assert_same,
    counted_collectives,
    own_slice,
    tensor_group,
)

B, S, IN = 2, 8, 16


def column_case(group, *, parts, bias, sequence_parallel, dtype):
    torch.manual_seed(1)
    reference = nn.Linear(IN, sum(parts), bias=bias, dtype=dtype)
    x, grad = torch.randn(B, S, IN, dtype=dtype), torch.randn(B, S, sum(parts), dtype=dtype)
    kind = Column(parts=parts if len(parts) > 1 else None)
    layer, shardings = shard_module(
        deepcopy(reference),
        kind,
        ModulePlace(group=group, sequence_parallel=sequence_parallel, shared={}),
    )
    assert isinstance(layer, ColumnParallelLinear)

    def local(full):
        return torch.cat([own_slice(part, group, -1) for part in full.split(parts, dim=-1)], dim=-1)

    full_x = x.clone().requires_grad_()
    expected = reference(full_x)
    expected.backward(grad)
    own_x = (own_slice(x, group, 1) if sequence_parallel else x).clone().requires_grad_()
    with counted_collectives() as counts:
        y = layer(own_x)
    assert counts == ({"all_gather": 1} if sequence_parallel else {})
    with counted_collectives() as counts:
        y.backward(local(grad))
    assert counts == (
        {"all_gather": 1, "reduce_scatter": 1} if sequence_parallel else {"all_reduce": 1}
    )
    assert_same(y, local(expected))
    assert own_x.grad is not None
    assert full_x.grad is not None
    assert_same(own_x.grad, own_slice(full_x.grad, group, 1) if sequence_parallel else full_x.grad)
    assert_gradients(layer, shardings, reference, group)
    assert not any(sharding.partial for sharding in shardings.values())


def row_case(group, *, bias, sequence_parallel, dtype):
    torch.manual_seed(2)
    reference = nn.Linear(IN, 6, bias=bias, dtype=dtype)
    x, grad = torch.randn(B, S, IN, dtype=dtype), torch.randn(B, S, 6, dtype=dtype)
    layer, shardings = shard_module(
        deepcopy(reference),
        Row(),
        ModulePlace(group=group, sequence_parallel=sequence_parallel, shared={}),
    )
    assert isinstance(layer, RowParallelLinear)

    def local(full):
        return own_slice(full, group, 1) if sequence_parallel else full

    full_x = x.clone().requires_grad_()
    expected = reference(full_x)
    expected.backward(grad)
    own_x = own_slice(x, group, -1).clone().requires_grad_()
    with counted_collectives() as counts:
        y = layer(own_x)
    assert counts == ({"reduce_scatter": 1} if sequence_parallel else {"all_reduce": 1})
    with counted_collectives() as counts:
        y.backward(local(grad))
    assert counts == ({"all_gather": 1} if sequence_parallel else {})
    assert_same(y, local(expected))
    assert own_x.grad is not None
    assert full_x.grad is not None
    assert_same(own_x.grad, own_slice(full_x.grad, group, -1))
    assert_gradients(layer, shardings, reference, group)
    if bias:
        assert bool(shardings["bias"].partial) == sequence_parallel


def check_layers(rank):
    group = tensor_group(rank)
    for dtype in (torch.float32, torch.float64):
        for sequence_parallel in (False, True):
            for bias in (False, True):
                for parts in ((12,), (8, 8, 8), (16, 4, 4)):
                    column_case(
                        group,
                        parts=parts,
                        bias=bias,
                        sequence_parallel=sequence_parallel,
                        dtype=dtype,
                    )
                row_case(group, bias=bias, sequence_parallel=sequence_parallel, dtype=dtype)


def check_autocast(rank):
    group = tensor_group(rank)
    for sequence_parallel in (False, True):
        torch.manual_seed(3)
        up, down = nn.Linear(IN, 32), nn.Linear(32, IN)
        x = torch.randn(B, S, IN)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = down(up(x))
        expected.float().square().mean().backward()
        columns, _ = shard_module(
            deepcopy(up),
            Column(),
            ModulePlace(group=group, sequence_parallel=sequence_parallel, shared={}),
        )
        rows, _ = shard_module(
            deepcopy(down),
            Row(),
            ModulePlace(group=group, sequence_parallel=sequence_parallel, shared={}),
        )
        own_x = own_slice(x, group, 1) if sequence_parallel else x
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = columns(own_x)
            y = rows(hidden)
        assert hidden.dtype is y.dtype is torch.bfloat16
        assert_same(y, own_slice(expected, group, 1) if sequence_parallel else expected)
        (y.float().square().sum() / x.numel()).backward()
        for layer, reference, dim in ((columns, up, 0), (rows, down, 1)):
            weight = layer.weight
            assert isinstance(weight, nn.Parameter)
            assert weight.grad.dtype is torch.float32
            assert reference.weight.grad is not None
            assert_same(
                weight.grad, own_slice(reference.weight.grad, group, dim), dtype=torch.bfloat16
            )


def check_details(rank):
    group = tensor_group(rank)
    torch.manual_seed(4)
    reference = nn.Linear(IN, 8)
    reference.weight.requires_grad_(False)
    frozen, _ = shard_module(
        reference, Column(), ModulePlace(group=group, sequence_parallel=True, shared={})
    )
    assert not frozen.get_parameter("weight").requires_grad
    x = torch.randn(B, S // group.size, IN)
    with counted_collectives() as counts:
        # x and the weight require no gradients, so nothing is sent for them
        frozen(x).sum().backward()
    assert counts == {"all_gather": 1}
    kept = saved_elements(frozen, torch.randn(B, S // group.size, IN, requires_grad=True))
    assert kept <= B * S // group.size * IN + IN * 8 // group.size, "the gathered input is saved"

    rows, _ = shard_module(
        nn.Linear(IN, 8), Row(), ModulePlace(group=group, sequence_parallel=False, shared={})
    )
    with pytest.raises(
        ValueError, match=f"needs {IN // group.size} features on a rank, but its input has {IN}"
    ):
        rows(torch.randn(B, S, IN))
    rows, _ = shard_module(
        nn.Linear(IN, 8), Row(), ModulePlace(group=group, sequence_parallel=True, shared={})
    )
    with pytest.raises(
        ValueError, match=f"length {4 * group.size + 1} .*tensor_parallel_size={group.size}"
    ):
        rows(torch.randn(B, 4 * group.size + 1, IN // group.size))
    with pytest.raises(ValueError, match="three dimensions"):
        rows(torch.randn(B, IN // group.size))


def saved_elements(module, x):
    """Return the number of elements that autograd saves for the backward pass."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    return sum(sizes)


@pytest.mark.parametrize("size", [2, 4])
def test_parallel_linear_matches_single_process(pool, size):
    pool.run(check_layers, world_size=size)


@pytest.mark.parametrize("size", [2, 4])
def test_linear_autocast_frozen_weight_and_invalid_input(pool, size):
    pool.run(check_autocast, world_size=size)
    pool.run(check_details, world_size=size)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_group_of_one_leaves_linear_unchanged(sequence_parallel):
    reference = nn.Linear(4, 6)
    for kind in (Column(), Row()):
        same, shardings = shard_module(
            reference,
            kind,
            ModulePlace(group=Group(), sequence_parallel=sequence_parallel, shared={}),
        )
        assert same is reference
        assert all(not sharding.sharded and not sharding.partial for sharding in shardings.values())
    x = torch.randn(2, 3, 4)
    for layer in (ColumnParallelLinear, RowParallelLinear):
        y = layer(
            reference.weight, reference.bias, group=Group(), sequence_parallel=sequence_parallel
        )(x)
        assert_same(y, reference(x))
