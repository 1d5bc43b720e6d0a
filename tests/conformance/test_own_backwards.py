"""Backwards that differ from one call for each batch that completes each gradient once."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset

from tests.conformance.toys import (
    LitNet,
    Place,
    assert_weights,
    make_trainer,
    samples,
    weights,
)
from tests.letters import Z


class LitOnce(LitNet):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LitGraph(LitOnce):
    """Keeps the graph of the gradients, as optimizers that use the Hessian need it."""

    def backward(self, loss):
        loss.backward(create_graph=True)


class LitTwice(LitOnce):
    """Adds two gradients."""

    def backward(self, loss):
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()


class LitReplaces(LitOnce):
    """Replaces each gradient as soon as it is complete."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(scale)


def scale(parameter):
    parameter.grad = 0.5 * parameter.grad


LAYOUTS = {
    "d2": {},
    "d2 sharded": {Z: "optimizer"},
    "d2 sharded gradients": {Z: "gradients"},
    "d2 sharded parameters": {Z: "parameters"},
}


def fit(rank, place, kind):
    trainer = make_trainer(place, use_distributed_sampler=False)
    own = Subset(samples(), range(rank, 32, place.world_size))
    trainer.fit(kind(), DataLoader(own, batch_size=8 // place.world_size))
    return weights(trainer)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", [LitGraph, LitTwice, LitReplaces])
def test_own_backwards_give_weights_of_single_process(kind, name, conformance):
    place = Place(world_size=2, layout={**LAYOUTS[name], "bucket_mb": 1e-3})
    for found, expected in conformance.pairs(fit, place, kind):
        assert_weights(found, expected)


class LitShares(LitOnce):
    """Runs one layer three times, each time in a checkpoint with a backward of its own."""

    def loss(self, batch):
        x, y = batch
        x = self.net[0](x)
        for _ in range(3):
            x = checkpoint(self.net[2], x.relu(), use_reentrant=True)
        return nn.functional.mse_loss(self.net[6](self.net[4](x)), y)


def refuse(rank, place):
    with pytest.raises(ValueError, match=r"'net\.2\.\w+' arrives after .*use_reentrant=False"):
        fit(rank, place, LitShares)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradient_that_arrives_during_its_sum_is_refused(name, conformance):
    layout = {**LAYOUTS[name], "bucket_mb": 1e-3}
    conformance.ranks(refuse, Place(world_size=2, layout=layout))
