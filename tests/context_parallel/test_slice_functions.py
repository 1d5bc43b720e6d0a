"""Replaced functions of torch, called in all ways that torch accepts."""

import pytest
import torch

from lightning_ptdp.context_parallel.slice_functions import SliceFunctions
from lightning_ptdp.world.mesh import Group

FUNCTIONS = SliceFunctions(attention=None, group=Group(ranks=(0, 1)), length=16)
X = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (torch.sum, {"dim": 0}),
        (torch.mean, {"dim": 0}),
        (torch.max, {"dim": 0}),
        (torch.roll, {"shifts": 1, "dims": 0}),
        (torch.narrow, {"dim": 0, "start": 1, "length": 1}),
    ],
)
def test_input_may_be_keyword(function, arguments):
    expected = function(X, **arguments)
    with FUNCTIONS.mode():
        found = function(input=X, **arguments)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "draw",
    [
        lambda **options: torch.randn(2, 3, **options),
        lambda **options: torch.rand(size=(2, 3), **options),
        lambda **options: torch.rand_like(input=X, **options),
    ],
)
def test_drawn_tensor_may_require_gradient(draw):
    torch.manual_seed(0)
    expected = draw(requires_grad=True)
    torch.manual_seed(0)
    with FUNCTIONS.mode():
        found = draw(requires_grad=True)
    assert found.is_leaf
    assert found.requires_grad
    assert torch.equal(found, expected)
