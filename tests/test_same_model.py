"""Ranks that have built different models, as nodes with different code or options do."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ptdp.strategy import PTDPStrategy
from tests.models.fits import quiet_trainer
from tests.pool import Pool


class Wide(L.LightningModule):
    """A model of a given width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, width), torch.nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.last(self.first(batch)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(rank: int, width: int) -> str:
    trainer = quiet_trainer(devices=2, strategy=PTDPStrategy(), max_steps=1)
    try:
        trainer.fit(Wide(8 if rank == 0 else width), DataLoader(torch.zeros(8, 4), batch_size=2))
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("width", [8, 9])
def test_rank_with_another_model_is_named_on_all_ranks(pool: Pool, width: int) -> None:
    messages = pool.run(fit, world_size=2, args=(width,))
    if width == 8:
        assert messages == ["", ""]
        return
    for message in messages:
        assert "rank 1: ValueError: 'first.weight' is torch.float32 (9, 4) here" in message
