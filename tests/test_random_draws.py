"""Modules that draw no random numbers: their generators are neither switched nor replayed."""

from unittest import mock

import pytest
import torch
from torch import nn

from lightning_ptdp.blocks import recompute
from lightning_ptdp.engine import step_random
from lightning_ptdp.forward.random_draws import RandomDraws
from lightning_ptdp.models import GPT, AdamWConfig, GPTConfig, LitGPT
from lightning_ptdp.strategy import PTDPStrategy
from tests.parity import make_trainer

SIZES = {
    "vocabulary_size": 32,
    "sequence_length": 8,
    "num_layers": 3,
    "hidden_size": 16,
    "num_heads": 2,
}


class Users(nn.Linear):
    """A module of a user, whose code is not known."""


@pytest.mark.parametrize(
    ("module", "draws"),
    [
        (nn.Linear(2, 2), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (nn.TransformerEncoderLayer(4, 2, dropout=0.0), False),
        (nn.TransformerEncoderLayer(4, 2), True),
        (nn.RReLU(), True),
        (nn.Sequential(Users(2, 2)), True),
        (GPT(GPTConfig.gpt2(**SIZES)).blocks[0], False),
        (GPT(GPTConfig.gpt2(**SIZES, dropout=0.1)).blocks[0], True),
    ],
)
def test_draws_are_known_from_probabilities_and_code(module, draws):
    assert RandomDraws(module)() == draws


def test_hooks_and_forwards_of_users_may_draw():
    hooked, replaced = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_forward_hook(lambda module, args, y: y + torch.randn_like(y))
    replaced.forward = lambda x: x + torch.randn_like(x)
    assert RandomDraws(hooked)()
    assert RandomDraws(replaced)()


def test_probability_may_change():
    dropout = nn.Dropout(0.0)
    draws = RandomDraws(dropout)
    assert not draws()
    dropout.p = 0.5
    assert draws()


@pytest.mark.parametrize(("dropout", "switches"), [(0.0, 1), (0.1, 1 + 3)])
def test_generators_are_switched_only_for_blocks_that_draw(dropout, switches):
    """Each microbatch switches once for the step, and for each block that draws."""
    rows = [{"input_ids": x[:-1], "labels": x[1:]} for x in torch.randint(32, (8, 9))]
    module = LitGPT(GPTConfig.gpt2(**SIZES, dropout=dropout), AdamWConfig(learning_rate=1e-3))
    kept = []
    run = recompute.checkpoint

    def checkpoint(*args, preserve_rng_state, **options):
        kept.append(preserve_rng_state)
        return run(*args, preserve_rng_state=preserve_rng_state, **options)

    trainer = make_trainer(PTDPStrategy(num_microbatches=2, recompute="full"), max_steps=1)
    with (
        mock.patch.object(step_random, "reseed", wraps=step_random.reseed) as reseed,
        mock.patch.object(recompute, "checkpoint", checkpoint),
    ):
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
    assert reseed.call_count == 2 * switches
    assert kept == [dropout > 0] * 6
