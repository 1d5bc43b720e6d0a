"""One training run, comparable between layouts: the model, the data and what is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_ptdp.models import GPT, GPTConfig, gpt_plan
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.tensor_parallel import ParallelPlan

VOCABULARY, LENGTH = 61, 16


@dataclass(frozen=True, kw_only=True)
class Run:
    """One point of the parity grid."""

    layout: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    layers: int = 4
    hidden: int = 16
    llama: bool = False
    experts: int | None = None
    steps: int = 20
    accumulate: int = 1
    clip: float | None = 0.05
    global_batch: int = 8
    samples: int = 64
    count_tokens: bool = True
    precision: str = "32-true"
    eager: bool = False
    ignore_padding: bool = True
    dropout: float = 0.0
    changing_lengths: bool = False
    validate_every: int | None = None


class PaddedTokens(Dataset):
    """Sequences of different true lengths: what is ignored differs between samples, microbatches
    and replicas.

    Args:
        count: Number of samples.
        ignore_padding: Whether labels behind the true length are ignored.
        batch: If given, a batch of this many samples is a token shorter than the one before it; the
            fourth is long again.
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

    def __getitem__(self, index: int) -> dict[str, Tensor]:
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
    """An ordinary module: nothing in its steps knows about ranks."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.model = run, None
        if run.eager:
            self.model = GPT(gpt_config(run))

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT(gpt_config(self.run))

    def configure_parallel(self) -> ParallelPlan:
        return gpt_plan(gpt_config(self.run))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = F.cross_entropy(
            self.model(batch["input_ids"]).flatten(0, 1),
            batch["labels"].flatten(),
            ignore_index=-100,
        )
        self.log("train_loss", loss, prog_bar=True)
        if self.run.count_tokens:
            return {"loss": loss, "num_tokens": (batch["labels"] != -100).sum()}
        return loss

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
            lr=5e-3,
            eps=1e-5,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 5)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LitValidated(LitTiny):
    """Evaluates too."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = F.cross_entropy(
            self.model(batch["input_ids"]).flatten(0, 1),
            batch["labels"].flatten(),
            ignore_index=-100,
        )
        self.log("val_loss", loss)
        return {"num_tokens": (batch["labels"] != -100).sum()}


class Recorder(L.Callback):
    """Losses of every batch, and norms."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.initial: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.initial = trainer.strategy.gather_state_dict()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(self._over_replicas(trainer, outputs))
        if trainer.strategy.gradient_norm is not None:
            self.norms.append(float(trainer.strategy.gradient_norm))

    def _over_replicas(self, trainer: Any, outputs: Any) -> float:
        """Mean over the counted tokens of all replicas; without a schedule Lightning's loss is this
        replica's own."""
        group = trainer.strategy.mesh.group("replica_sum")
        weight = float(outputs.get("num_tokens", 1.0))
        sums = torch.tensor([float(outputs["loss"]) * weight, weight], dtype=torch.float64)
        if group.size > 1:
            torch.distributed.all_reduce(sums, group=group.handle)
        return float(sums[0] / sums[1])


def fit(rank: int, run: Run) -> dict[str, Any]:
    """Train; returns losses, norms, initial and final weights of the whole model."""
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    module = LitTiny(run) if run.validate_every is None else LitValidated(run)
    trainer = L.Trainer(
        strategy=PTDPStrategy(**run.layout),
        accelerator="cpu",
        devices=run.world_size,
        max_steps=run.steps // run.accumulate,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=run.clip,
        precision=run.precision,
        val_check_interval=run.validate_every,
        check_val_every_n_epoch=None if run.validate_every else 1,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module,
        _loader(run, trainer, run.samples),
        _loader(run, trainer, 5) if run.validate_every else None,
    )
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "initial": recorder.initial,
        "final": trainer.strategy.gather_state_dict(),
        "ranges": trainer.strategy.parallel.ranges,
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def _loader(run: Run, trainer: Any, samples: int) -> DataLoader:
    """Lightning's injected sampler shuffles for training; this keeps the order, so that batches
    have the same samples everywhere."""
    batch = run.global_batch if run.changing_lengths else None
    data = PaddedTokens(samples, ignore_padding=run.ignore_padding, batch=batch)
    sampler = torch.utils.data.DistributedSampler(
        data, **trainer.strategy.distributed_sampler_kwargs, shuffle=False
    )
    return DataLoader(
        data, batch_size=run.global_batch // trainer.strategy.layout.num_replicas, sampler=sampler
    )


class Frozen(Run):
    """A run without layout, hashable for the cache."""

    def __hash__(self) -> int:
        return hash(tuple(sorted((k, repr(v)) for k, v in vars(self).items())))


def assert_same(
    found: dict[str, Any],
    expected: dict[str, Any],
    tolerance: float = 1e-5,
    of_weights: float | None = None,
) -> None:
    assert found["initial"].keys() == expected["initial"].keys()
    for name, value in expected["initial"].items():
        assert torch.equal(found["initial"][name], value), f"{name} starts differently"
    torch.testing.assert_close(
        torch.tensor(found["losses"]), torch.tensor(expected["losses"]), rtol=tolerance, atol=0
    )
    torch.testing.assert_close(
        torch.tensor(found["norms"]), torch.tensor(expected["norms"]), rtol=tolerance, atol=0
    )
    for name, value in expected["final"].items():
        difference = (found["final"][name] - value).norm() / value.norm()
        assert difference < (of_weights or tolerance), f"{name} ends {difference:.1e} away"
