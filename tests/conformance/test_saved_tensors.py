"""Writes to tensors that the backward needs. Autograd does not check tensors that hooks pack."""

import pytest
from torch import nn

from tests.conformance.toys import LitNet, Place, assert_weights, loader, make_trainer, weights
from tests.letters import R, Z

PLACES = {
    "offload": Place(layout={R: "offload"}),
    "sharded": Place(world_size=2, layout={Z: "parameters"}),
}


class Block(nn.Module):
    """Writes to a tensor before its use, and with ``spoils`` again after it."""

    def __init__(self, spoils):
        super().__init__()
        self.spoils = spoils
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        hidden = nn.functional.relu_(self.inner(x).mul_(0.5))
        output = self.outer(hidden)
        if self.spoils:
            hidden.mul_(3)
        return x + output


class LitWrites(LitNet):
    def __init__(self, spoils):
        super().__init__()
        blocks = [Block(spoils=spoils and index == 1) for index in range(3)]
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Sequential(*blocks), nn.Linear(16, 1))


def fit(rank, place, spoils):
    trainer = make_trainer(place)
    trainer.fit(LitWrites(spoils), loader(batch_size=8 // place.world_size))
    return weights(trainer)


def refuse(rank, place):
    with pytest.raises(RuntimeError, match=r"\(., 16\) that was changed in place after its use"):
        fit(rank, place, spoils=True)


@pytest.mark.parametrize("name", PLACES)
def test_write_to_tensor_that_backward_needs_is_refused(name, conformance):
    conformance.ranks(refuse, PLACES[name])


@pytest.mark.parametrize("name", PLACES)
def test_write_to_other_tensor_is_allowed(name, conformance):
    ours, expected = (
        conformance.ranks(fit, place, False)
        for place in (PLACES[name], Place(world_size=PLACES[name].world_size))
    )
    assert_weights(ours[0], expected[0])
