"""A small language model with ``flops_per_sample``, and its data."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

LENGTH, BATCH, FLOPS = 6, 4, 1e9


class Tokens(LightningModule):
    """A language model that consists of one embedding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 10)

    def flops_per_sample(self, sequence_length: int) -> float:
        return FLOPS * sequence_length

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(
            self.table(batch["input_ids"]).flatten(0, 1), batch["input_ids"].flatten()
        )

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self):
        ids = torch.randint(10, (40 * BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
        return DataLoader([{"input_ids": row} for row in ids], batch_size=BATCH)

    def val_dataloader(self):
        return self.train_dataloader()
