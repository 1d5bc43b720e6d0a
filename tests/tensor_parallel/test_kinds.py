"""A user-defined kind, used in a plan like the package's own kinds."""

from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lightning_ptdp.tensor_parallel import Kind, ParallelPlan
from lightning_ptdp.tensor_parallel.collectives import copy, gather_last
from lightning_ptdp.tensor_parallel.kinds import check_divides
from lightning_ptdp.tensor_parallel.tensor_shards import shard_columns
from lightning_ptdp.world.mesh import Group
from tests.tensor_parallel.sharded import apply_plan
from tests.tensor_parallel.toy import assert_gradients, assert_same, tensor_group


@dataclass(frozen=True, kw_only=True)
class ByOutput(Kind):
    """``nn.Bilinear`` split by output features, with a gathered output."""

    takes = "nn.Bilinear"
    types = (nn.Bilinear,)
    sharding = "by output, gathered"
    split_dim = 0

    def check(self, name, module, size):
        check_divides(name, "out_features", module.get_parameter("weight").size(0), size)

    def placements(self, module, place):
        group = place.group
        shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        return {
            n: shard_columns(s, parts=s[:1], size=group.size, index=group.rank)
            for n, s in shapes.items()
        }

    def build(self, module, local, place):
        return _OwnOutputs(local["weight"], local["bias"], place.group)


class _OwnOutputs(nn.Module):
    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, group: Group) -> None:
        super().__init__()
        self.weight, self.bias, self.group = weight, bias, group

    def forward(self, left, right):
        left, right = copy(left, self.group), copy(right, self.group)
        return gather_last(nn.functional.bilinear(left, right, self.weight, self.bias), self.group)


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.last = nn.Bilinear(4, 5, 6), nn.Linear(6, 3)

    def forward(self, left, right):
        return self.last(self.mix(left, right).relu())


PLAN = ParallelPlan(tensor={"mix": ByOutput()})


def _compare(rank):
    group = tensor_group(rank)
    torch.manual_seed(0)
    reference = _Model()
    left, right = torch.randn(7, 4), torch.randn(7, 5)
    inputs = left.clone().requires_grad_(), right.clone().requires_grad_()
    expected_inputs = left.clone().requires_grad_(), right.clone().requires_grad_()
    model = deepcopy(reference)
    placements = apply_plan(model, PLAN, group=group, sequence_parallel=False)
    assert placements["mix.weight"].local_shape == (3, 4, 5)
    y, expected = model(*inputs), reference(*expected_inputs)
    assert_same(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert_gradients(model, placements, reference, group)
    for got, whole in zip(inputs, expected_inputs, strict=True):
        assert_same(got.grad, whole.grad)


def test_user_defined_kind_matches_single_process(pool):
    pool.run(_compare, world_size=2)
    assert "(6/t, 4, 5)  by output, gathered" in PLAN.explain(_Model())


def test_user_defined_kind_refuses_unsupported_modules():
    with pytest.raises(
        ValueError,
        match=r"'last' is a Linear, which cannot be sharded as ByOutput\(\): that takes "
        r"nn.Bilinear",
    ):
        ParallelPlan(tensor={"last": ByOutput()}).check(_Model(), tensor_parallel_size=2)
    with pytest.raises(
        ValueError, match="'mix': out_features=6 is not divisible by tensor_parallel_size=4"
    ):
        PLAN.check(_Model(), tensor_parallel_size=4)
