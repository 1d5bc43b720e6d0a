"""Column and row layers against ``nn.Linear`` in a single process: output, gradients and
collectives."""

from copy import deepcopy
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from lightning_ptdp.tensor_parallel import Column, ColumnParallelLinear, Row, RowParallelLinear
from lightning_ptdp.world.mesh import Group
from tests.tensor_parallel.toy import (
    assert_gradients,
    assert_same,
    compare_passes,
    counted_collectives,
    own_slice,
    sequence_slice,
    shard,
    tensor_group,
)

B, S, IN = 2, 8, 16


def column_case(group, *, parts, bias, sequence_parallel, dtype):
    torch.manual_seed(1)
    reference = nn.Linear(IN, sum(parts), bias=bias, dtype=dtype)
    x, grad = torch.randn(B, S, IN, dtype=dtype), torch.randn(B, S, sum(parts), dtype=dtype)
    kind = Column(parts=parts if len(parts) > 1 else None)
    layer, shardings = shard(deepcopy(reference), kind, group, sequence_parallel=sequence_parallel)
    assert isinstance(layer, ColumnParallelLinear)

    def features(full):
        return torch.cat([own_slice(part, group, -1) for part in full.split(parts, dim=-1)], dim=-1)

    sequence = sequence_slice(group, sequence_parallel)
    forward, backward = compare_passes(
        layer, reference, x, grad, own_input=sequence, own_output=features
    )
    if sequence_parallel:
        assert (forward, backward) == ({"all_gather": 1}, {"all_gather": 1, "reduce_scatter": 1})
    else:
        assert (forward, backward) == ({}, {"all_reduce": 1})
    assert_gradients(layer, shardings, reference, group)
    assert not any(sharding.partial for sharding in shardings.values())


def row_case(group, *, bias, sequence_parallel, dtype):
    torch.manual_seed(2)
    reference = nn.Linear(IN, 6, bias=bias, dtype=dtype)
    x, grad = torch.randn(B, S, IN, dtype=dtype), torch.randn(B, S, 6, dtype=dtype)
    layer, shardings = shard(deepcopy(reference), Row(), group, sequence_parallel=sequence_parallel)
    assert isinstance(layer, RowParallelLinear)
    features = partial(own_slice, group=group, dim=-1)
    sequence = sequence_slice(group, sequence_parallel)
    forward, backward = compare_passes(
        layer, reference, x, grad, own_input=features, own_output=sequence
    )
    if sequence_parallel:
        assert (forward, backward) == ({"reduce_scatter": 1}, {"all_gather": 1})
    else:
        assert (forward, backward) == ({"all_reduce": 1}, {})
    assert_gradients(layer, shardings, reference, group)
    if bias:
        assert bool(shardings["bias"].partial) == sequence_parallel


def check_layers(rank):
    group = tensor_group(rank)
    for dtype, sequence_parallel, bias in product(
        (torch.float32, torch.float64), (False, True), (False, True)
    ):
        options = {"bias": bias, "sequence_parallel": sequence_parallel, "dtype": dtype}
        for parts in ((12,), (8, 8, 8), (16, 4, 4)):
            column_case(group, parts=parts, **options)
        row_case(group, **options)


def check_autocast(rank):
    group = tensor_group(rank)
    for sequence_parallel in (False, True):
        torch.manual_seed(3)
        up, down = nn.Linear(IN, 32), nn.Linear(32, IN)
        x = torch.randn(B, S, IN)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = down(up(x))
        expected.float().square().mean().backward()
        columns, _ = shard(deepcopy(up), Column(), group, sequence_parallel=sequence_parallel)
        rows, _ = shard(deepcopy(down), Row(), group, sequence_parallel=sequence_parallel)
        sequence = sequence_slice(group, sequence_parallel)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = columns(sequence(x))
            y = rows(hidden)
        assert hidden.dtype is y.dtype is torch.bfloat16
        assert_same(y, sequence(expected))
        (y.float().square().sum() / x.numel()).backward()
        for layer, reference, dim in ((columns, up, 0), (rows, down, 1)):
            gradient, whole = layer.weight.grad, reference.weight.grad
            assert gradient.dtype is torch.float32
            assert_same(gradient, own_slice(whole, group, dim), dtype=torch.bfloat16)


def check_details(rank):
    group = tensor_group(rank)
    torch.manual_seed(4)
    reference = nn.Linear(IN, 8)
    reference.weight.requires_grad_(False)
    frozen, _ = shard(reference, Column(), group, sequence_parallel=True)
    assert not frozen.get_parameter("weight").requires_grad
    x = torch.randn(B, S // group.size, IN)
    with counted_collectives() as counts:
        # x and the weight require no gradients, so nothing is sent for them
        frozen(x).sum().backward()
    assert counts == {"all_gather": 1}
    kept = saved_elements(frozen, torch.randn(B, S // group.size, IN, requires_grad=True))
    assert kept <= B * S // group.size * IN + IN * 8 // group.size, "the gathered input is saved"

    rows, _ = shard(nn.Linear(IN, 8), Row(), group)
    with pytest.raises(
        ValueError, match=f"needs {IN // group.size} features on a rank, but its input has {IN}"
    ):
        rows(torch.randn(B, S, IN))
    rows, _ = shard(nn.Linear(IN, 8), Row(), group, sequence_parallel=True)
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
@pytest.mark.parametrize("check", [check_layers, check_autocast, check_details])
def test_parallel_linear_matches_single_process(pool, check, size):
    pool.run(check, world_size=size)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_layer_in_group_of_one_equals_linear(layer, sequence_parallel):
    reference, x = nn.Linear(4, 6), torch.randn(2, 3, 4)
    options = {"group": Group(), "sequence_parallel": sequence_parallel}
    assert_same(layer(reference.weight, reference.bias, **options)(x), reference(x))
