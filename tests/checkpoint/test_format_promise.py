"""Stored checkpoints of released formats, which later versions must read.

``formats/4`` was written by ``write`` below. A format is added when it changes; none is rewritten.
"""

from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ptdp.checkpoint import read_full, verify_checkpoint
from lightning_ptdp.strategy import PTDPStrategy
from tests.models.fits import quiet_trainer

FORMATS = Path(__file__).with_name("formats")
STEPS = 2


class Counted(L.LightningModule):
    """Trains without a change: its weights are 0, 1, 2, ..., its gradient is 1 and its rate 0."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0, momentum=0.5)


def fit(module, steps, start=None):
    trainer = quiet_trainer(
        strategy=PTDPStrategy(checkpoint_format="folder"), max_steps=steps, max_epochs=9
    )
    trainer.fit(module, DataLoader(torch.zeros(STEPS, 1)), ckpt_path=start)
    return trainer


def write(folder):
    fit(Counted(), STEPS).save_checkpoint(folder)


@pytest.mark.parametrize("name", sorted(path.name for path in FORMATS.iterdir()))
def test_checkpoint_of_earlier_release_is_read(name):
    verify_checkpoint(FORMATS / name)
    weights = read_full(FORMATS / name)
    assert torch.equal(weights["weight"], torch.arange(6.0).reshape(2, 3))
    module = Counted()
    torch.nn.init.zeros_(module.weight)
    trainer = fit(module, STEPS + 1, FORMATS / name)
    assert trainer.global_step == STEPS + 1
    assert torch.equal(module.weight, torch.arange(6.0).reshape(2, 3))
    # Momentum after gradients of 1: 1, then 0.5 + 1, then 0.75 + 1.
    state = trainer.optimizers[0].state[module.weight]
    assert torch.equal(state["momentum_buffer"], torch.full((2, 3), 1.75))
