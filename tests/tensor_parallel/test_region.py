"""Regions around several layers that share an input."""

import torch
from torch import nn

from lightning_ptdp.tensor_parallel.region import enter_region
from tests.tensor_parallel.toy import tensor_group


class Scaled(nn.Module):
    def forward(self, x, scale):
        return x * scale


def _gradients(rank):
    module, scale = Scaled(), torch.ones((), requires_grad=True)
    enter_region(
        module, heads=None, arguments=(), group=tensor_group(rank), sequence_parallel=False
    )
    x = torch.ones(2, 3, 4, requires_grad=True)
    module(scale=scale, x=x).sum().backward()
    return x.grad, scale.grad


def test_first_argument_is_found_by_its_name(pool):
    """A call may name the arguments in another order than the forward."""
    for of_x, of_scale in pool.run(_gradients, world_size=2):
        assert torch.equal(of_x, torch.full((2, 3, 4), 2.0))
        assert float(of_scale) == 24.0
