"""Module with hyperparameters for both Lightning namespaces, without imports of this package."""

from typing import Any

import torch
from torch import nn


def make(lightning: Any, data: Any = None) -> tuple[type, type]:
    """Return the module class and the data module class in the namespace ``lightning``."""

    class LitSaved(lightning.LightningModule):
        def __init__(
            self,
            width: int = 4,
            rates: tuple[float, float] = (0.1, 0.2),
            names: list[str] | None = None,
        ) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(
                nn.Linear(2, width),
                nn.Tanh(),
                nn.Linear(width, width),
                nn.Tanh(),
                nn.Linear(width, 2),
            )
            self.seen: list[str] = []

        def training_step(self, batch, batch_idx):
            loss = self.net(batch).square().mean()
            self.log("train_loss", loss)
            return loss

        def test_step(self, batch, batch_idx):
            self.log("test_loss", self.net(batch).square().mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=self.hparams["rates"][0])

        def on_load_checkpoint(self, checkpoint):
            self.seen = list(checkpoint["state_dict"])

    class SavedData(lightning.LightningDataModule):
        def __init__(self, batch_size: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self):
            return torch.utils.data.DataLoader(
                torch.linspace(-1, 1, 32).view(16, 2), batch_size=self.hparams["batch_size"]
            )

        test_dataloader = train_dataloader

    return LitSaved, SavedData
