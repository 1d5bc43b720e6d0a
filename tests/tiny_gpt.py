"""A small GPT on padded sequences: the model, its data and its training."""

from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_ptdp.models import GPT, AdamWConfig, GPTConfig, MuonWithAdamW, gpt_plan
from lightning_ptdp.models.adamw_variants import HalfStateAdamW
from lightning_ptdp.models.optimizer_setup import build_muon
from lightning_ptdp.tensor_parallel import ParallelPlan
from tests.parity import Training, make_loader

VOCABULARY, LENGTH = 61, 16


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    """A training of the small GPT."""

    clip: float | None = 0.05
    layers: int = 4
    hidden: int = 16
    llama: bool = False
    experts: int | None = None
    samples: int = 64
    count_tokens: bool = True
    eager: bool = False
    ignore_padding: bool = True
    dropout: float = 0.0
    changing_lengths: bool = False
    muon: bool = False
    half_states: bool = False

    trainer_options: ClassVar[dict[str, Any]] = {}

    def make_module(self) -> L.LightningModule:
        return LitTiny(self) if self.validate_every is None else LitValidated(self)

    def make_data(self, samples: int | None = None) -> Dataset:
        batch = self.global_batch if self.changing_lengths else None
        return PaddedTokens(
            samples or self.samples, ignore_padding=self.ignore_padding, batch=batch
        )

    def make_loaders(self, trainer: L.Trainer) -> list[DataLoader]:
        loaders = super().make_loaders(trainer)
        return [
            loaders[0],
            *(make_loader(self.make_data(5), trainer, self.global_batch) for _ in loaders[1:]),
        ]

    def results(self, trainer: Any, module: Any) -> dict[str, Any]:
        return {"ranges": trainer.strategy.parallel.ranges}


def build_exact_muon(module: L.LightningModule) -> MuonWithAdamW:
    """Return an optimizer whose Muon iterates in float32.

    torch's iterates in bfloat16, which enlarges differences in the order of float32 sums.
    """
    optimizer = build_muon(module, AdamWConfig(learning_rate=5e-3, eps=1e-5))
    muon = optimizer._muon
    step = muon.step

    def exactly() -> None:
        with (
            mock.patch.object(torch, "bfloat16", torch.float32),
            mock.patch.object(Tensor, "bfloat16", Tensor.float),  # in torch 2.11
        ):
            step()

    muon.step = exactly
    return optimizer


class PaddedTokens(Dataset):
    """Padded sequences of different lengths.

    Samples, microbatches and replicas therefore ignore different numbers of labels.

    Args:
        count: Number of samples.
        ignore_padding: Ignore the labels after the true length.
        batch: If given, each batch of this many samples is one token shorter than the previous
            one; the fourth has the full length again.
    """

    def __init__(
        self, count: int, *, ignore_padding: bool = True, batch: int | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=generator)
        self.lengths = torch.randint(1, LENGTH + 1, (count,), generator=generator)
        if not ignore_padding:
            self.lengths.fill_(LENGTH)
        self.batch = batch

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index):
        labels = self.tokens[index, 1:].clone()
        labels[self.lengths[index] :] = -100
        length = LENGTH if self.batch is None else LENGTH - index // self.batch % 3
        return {"input_ids": self.tokens[index, :-1][:length], "labels": labels[:length]}


def gpt_config(run: Run) -> GPTConfig:
    sizes = {
        "vocabulary_size": VOCABULARY,
        "sequence_length": LENGTH,
        "num_layers": run.layers,
        "hidden_size": run.hidden,
        "num_heads": 4,
        "dropout": run.dropout,
    }
    if run.llama:
        return GPTConfig.llama(
            **sizes,
            num_kv_heads=2,
            num_experts=run.experts,
            init_std=0.02 if run.experts is None else 0.3,
        )
    return GPTConfig.gpt2(**sizes)


class LitTiny(L.LightningModule):
    """An ordinary module whose steps do not depend on ranks."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.model = run, None
        if run.eager:
            self.model = GPT(gpt_config(run))

    def configure_model(self):
        if self.model is None:
            self.model = GPT(gpt_config(self.run))

    def configure_parallel(self) -> ParallelPlan:
        return gpt_plan(gpt_config(self.run))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        if self.run.count_tokens:
            return {"loss": loss, "num_tokens": (batch["labels"] != -100).sum()}
        return loss

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        if self.run.muon:
            return build_exact_muon(self)
        kind = HalfStateAdamW if self.run.half_states else torch.optim.AdamW
        optimizer = kind(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
            lr=5e-3,
            eps=1e-5,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 5)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LitValidated(LitTiny):
    """Module with a validation step."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))
        return {"num_tokens": (batch["labels"] != -100).sum()}
