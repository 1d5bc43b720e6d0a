"""Replaced functions of torch, called in all ways that torch accepts."""

import pytest
import torch

from lightning_ptdp.attention import shard_sequence
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


@pytest.mark.parametrize(
    "draw",
    [
        torch.bernoulli,
        torch.Tensor.bernoulli,
        torch.rand_like,
        lambda x: torch.rand(x.shape),
        lambda x: torch.empty_like(x).bernoulli_(x),
        lambda x: torch.empty_like(x).log_normal_(),
        lambda x: torch.normal(x, 1.0),
        lambda x: torch.randint_like(x, 9),
        lambda x: torch.nn.functional.gumbel_softmax(torch.stack([x, 1 - x], -1)),
        torch.nn.AlphaDropout(),
        lambda x: torch.normal(mean=x, std=1.0),
        lambda x: torch.normal(1.0, 2.0, x.shape),
        lambda x: torch.nn.init.normal_(torch.empty_like(x), 1.0, 2.0),
        lambda x: torch.nn.init.uniform_(torch.empty_like(x), a=1.0, b=2.0),
        lambda x: torch.dropout(x, p=0.5, train=True),
        lambda x: torch.nn.Dropout1d()(x.unsqueeze(-1)),
        lambda x: torch.distributions.Categorical(torch.stack([x, 1 - x], -1)).sample(),
        lambda x: torch.rand_like(x.flatten()).view_as(x),
        lambda x: torch.nn.functional.dropout(x.flatten().unsqueeze(-1)).view_as(x),
    ],
)
def test_numbers_of_tokens_are_those_of_full_sequence(draw):
    chances = torch.linspace(0.1, 0.9, 32).view(2, 16)
    torch.manual_seed(0)
    expected = draw(chances)
    for rank in range(2):
        functions = SliceFunctions(
            attention=None,
            group=Group(ranks=(0, 1), rank=rank),
            length=16,
            samples=2,
            shares_stream=lambda: True,
        )
        own = shard_sequence(chances, 1, rank=rank, size=2)
        torch.manual_seed(0)
        with functions.mode():
            found = draw(own)
        assert torch.equal(found, shard_sequence(expected, 1, rank=rank, size=2))


def test_functions_of_other_tensors_are_those_of_torch():
    functions = SliceFunctions(
        attention=None, group=Group(ranks=(0, 1)), length=16, samples=2, shares_stream=lambda: True
    )
    with functions.mode():
        assert torch.nn.Embedding(3, 4).weight.is_leaf
        torch.nn.init.uniform_(torch.nn.Parameter(torch.empty(16, 4)))
        # eight classes, as many as tokens of the slice
        assert torch.multinomial(X.new_ones(2, 8), 1).shape == (2, 1)
