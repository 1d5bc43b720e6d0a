"""Small correct and wrong LightningModules, with their data."""

from __future__ import annotations

import os
import time
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanSquaredError

from lightning_ptdp.tensor_parallel import ParallelPlan
from tests.tiny_gpt import LitTiny, PaddedTokens, Run

WIDTH, LENGTH = 8, 4


class Samples(Dataset):
    """Sequences of numbers, with 0 to 3 ignored labels per sample."""

    def __init__(self, count: int = 24) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(count, LENGTH, WIDTH, generator=generator)
        self.y = torch.randn(count, LENGTH, WIDTH, generator=generator)
        self.labels = torch.randint(0, WIDTH, (count, LENGTH), generator=generator)
        for index in range(count):
            self.labels[index, LENGTH - index % 4 :] = -100

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index], "labels": self.labels[index]}


def loader(count: int = 24, batch: int = 4, **options: Any) -> DataLoader:
    return DataLoader(Samples(count), batch_size=batch, **options)


def tokens(count: int = 16) -> DataLoader:
    return DataLoader(PaddedTokens(count), batch_size=4)


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = norm(WIDTH if norm is nn.LayerNorm else LENGTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Lit(L.LightningModule):
    """A typical module."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)

    def configure_parallel(self) -> ParallelPlan:
        return ParallelPlan(
            blocks="blocks", tensor={"blocks.*.up": "column", "blocks.*.down": "row"}
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self(batch["x"]), batch["y"]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class LitAdam(Lit):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class LitCounted(Lit):
    """Ignores some labels, and returns the number of the others."""

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(
            self(batch["x"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100
        )
        self.log("train_loss", loss)
        return {"loss": loss, "num_tokens": (batch["labels"] != -100).sum()}


class LitNoisy(Lit):
    """Draws noise for each sample in the step."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"] + torch.randn_like(batch["y"]))


class LitRecurrent(Lit):
    """Has dropout between the layers of an LSTM, inside one call of torch."""

    def configure_model(self):
        if not hasattr(self, "recurrent"):
            self.recurrent = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x):
        return super().forward(self.recurrent(x)[0])


class LitRounding(Lit):
    """Computes a term in float32 for any dtype, with cancellation."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1e3))

    def forward(self, x):
        scale = self.scale.float()
        return super().forward(x) + (
            torch.cos(scale * x.float()) - torch.cos(scale * x.float() + 1e-3)
        ).to(x)


class Graph:
    """A batch without a sample dimension."""

    def __init__(self, samples: list[dict[str, Tensor]]) -> None:
        self.fields = {
            name: torch.stack([sample[name] for sample in samples]) for name in ("x", "y")
        }

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def to(self, *_: object, **__: object) -> Graph:
        return self


class LitClocked(Lit):
    """Logs the time."""

    def training_step(self, batch, batch_idx):
        # values differ much even after a short time
        self.log("clock", float(time.perf_counter_ns() % 1_000_003))
        return super().training_step(batch, batch_idx)


class LitLayered(Lit):
    """Has a separate learning rate for each block."""

    def configure_optimizers(self):
        groups = [
            {"params": block.parameters(), "lr": 0.1 / (1 + index)}
            for index, block in enumerate(self.blocks)
        ]
        return torch.optim.SGD(
            [{"params": [*self.first.parameters(), *self.last.parameters()]}, *groups], lr=0.05
        )


class LitDecayed(Lit):
    """Decays matrices, but not vectors."""

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}],
            lr=1e-2,
        )


class LitFrozen(Lit):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)


class LitTied(Lit):
    """Ties the weight of the last layer to that of the first."""

    def __init__(self):
        super().__init__()
        self.last.weight = self.first.weight


class LitAveraged(Lit):
    """Keeps a moving average of a weight."""

    average: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH, WIDTH))

    def on_train_batch_end(self, *_):
        self.average.lerp_(self.last.weight.detach(), 0.5)


class LitManual(Lit):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.log("train_loss", loss)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class LitScheduled(Lit):
    """Halves the learning rate after each step."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, nesterov=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class LitMeasured(Lit):
    """Logs a metric of the whole epoch."""

    def __init__(self):
        super().__init__()
        self.error = MeanSquaredError()

    def validation_step(self, batch, batch_idx):
        self.error(self(batch["x"]).flatten(), batch["y"].flatten())
        self.log("val_error", self.error, on_epoch=True)


# ---- wrong in some layout ------------------------------------------------------------------------


class EntropyNoise(Lit):
    """Draws random numbers that no seed controls."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"]) * (1 + os.urandom(1)[0] / 255)


class UnseededGenerator(Lit):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        noise = np.random.default_rng().standard_normal(batch["y"].shape)
        return F.mse_loss(self(batch["x"]), batch["y"] + torch.tensor(noise, dtype=torch.float32))


class Penalty(Lit):
    """Reads a parameter of which each rank holds a shard."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) + self.blocks[0].up.weight.abs().amax()


class ClippedByHand(Lit):
    """Clips manually, by the norm of the local gradients."""

    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        for gradient in gradients:
            gradient.mul_(0.01 / norm)


class Shifted(LitTiny):
    """Shifts the labels in the step."""

    def __init__(self):
        super().__init__(Run())

    def training_step(self, batch, batch_idx):
        logits = self.model(batch["input_ids"])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


class Contrastive(Lit):
    """Uses the other samples of the batch as negatives."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        similar = self(batch["x"]).flatten(1) @ batch["y"].flatten(1).T
        return F.cross_entropy(similar, torch.arange(len(similar)))


class ContrastiveCounted(Contrastive):
    """Returns the number of labels, which is not the cause of different losses."""

    def training_step(self, batch, batch_idx):
        return {
            "loss": super().training_step(batch, batch_idx),
            "num_tokens": (batch["labels"] != -100).sum(),
        }


class Summed(Lit):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return 1e-2 * F.mse_loss(self(batch["x"]), batch["y"], reduction="sum")


class ScaledRate(Lit):
    """Scales the learning rate with the world size."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.world_size)


class Counting(Lit):
    """Counts the calls in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return super().loss(batch) / (1 + (self.calls - 1) // 2)


class Uncounted(LitCounted):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"]


class NormalizedSGD(torch.optim.SGD):
    """Divides the gradients by the norm of all of them."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            for gradient in gradients:
                gradient.div_(norm + 1e-3)
        super().step()
        return loss


class Normalized(Lit):
    def configure_optimizers(self):
        return NormalizedSGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return loader(shuffle=True)

    def val_dataloader(self):
        return loader(8)
