"""One training of our own GPT with experts, on sequences of which unequal parts are labelled."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_ptdp import ParallelPlan, PTDPStrategy
from lightning_ptdp.models import GPT, AdamWConfig, GPTConfig, LitGPT, gpt_plan

VOCABULARY, LENGTH, SAMPLES, BATCH = 29, 8, 48, 8

EXPERTS = {
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_hidden_size": 12,
    "z_loss_coefficient": 0.05,
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training."""

    model: dict[str, Any] = field(default_factory=dict)
    usual: bool = False
    layout: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    steps: int = 6
    accumulate: int = 1
    clip: float = 0.3
    save: str | None = None
    resume: str | None = None


class Labelled(Dataset):
    """Tokens of which the first few have labels, how many differs; of one sequence none. Or all."""

    def __init__(self, *, all_labelled: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
        self.lengths = torch.randint(1, LENGTH + 1, (SAMPLES,), generator=generator)
        self.lengths[5] = 0
        if all_labelled:
            self.lengths[:] = LENGTH

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index, 1:].clone()
        labels[self.lengths[index] :] = -100
        return {"input_ids": self.tokens[index, :-1], "labels": labels}


def config_of(run: Run) -> GPTConfig:
    sizes = {
        "vocabulary_size": VOCABULARY,
        "sequence_length": LENGTH,
        "num_layers": 4,
        "hidden_size": 16,
        "num_heads": 4,
    }
    return GPTConfig.llama(
        **sizes, num_kv_heads=2, ffn_hidden_size=24, init_std=0.3, **EXPERTS | run.model
    )


class LitUsual(L.LightningModule):
    """A typical user's module around a GPT with experts.

    It averages the loss without weights for unequal numbers of labelled tokens.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config

    def configure_model(self) -> None:
        self.model = GPT(self.config)

    def configure_parallel(self) -> ParallelPlan:
        return gpt_plan(self.config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, aux_b3 = self.model(batch["input_ids"], auxiliary=True)
        balance, square, _ = aux_b3.mean(0)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss)
        return loss + 0.2 * balance + 0.02 * square

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.model.balance(
            partial(self.trainer.strategy.reduce, group=dist.group.WORLD, reduce_op="sum")
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def module_of(run: Run) -> L.LightningModule:
    if run.usual:
        return LitUsual(config_of(run))
    return LitGPT(config_of(run), AdamWConfig(learning_rate=1e-2, warmup_steps=1, eps=1e-3))


def trainer_of(run: Run, *callbacks: L.Callback) -> L.Trainer:
    return L.Trainer(
        strategy=PTDPStrategy(**run.layout),
        accelerator="cpu",
        devices=run.world_size,
        max_steps=run.steps,
        logger=False,
        gradient_clip_val=run.clip,
        accumulate_grad_batches=run.accumulate,
        precision="64-true",
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )


class Recorder(L.Callback):
    """Logged metrics and gradient norms of every step, and the initial weights.

    It also counts the elements of expert parameters, gradients and optimizer states on this rank.
    """

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.norms: list[float] = []
        self.initial: dict[str, Tensor] = {}
        self.held: dict[str, int] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        parameters = [
            parameter for name, parameter in module.named_parameters() if "experts" in name
        ]
        states = [
            value for each in parameters for value in optimizer.state[each].values() if value.dim()
        ]
        # a sharded optimizer has none
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        found = {"parameters": parameters, "gradients": gradients, "states": states}
        self.held = {
            what: sum(tensor.numel() for tensor in tensors) for what, tensors in found.items()
        }

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.initial = trainer.strategy.gather_state_dict()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        if trainer.strategy.gradient_norm is not None:
            self.norms.append(float(trainer.strategy.gradient_norm))


def fit(rank: int, run: Run) -> dict[str, Any]:
    """Train; norms, what is logged, and the initial and the final weights of the whole model."""
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    trainer, module = trainer_of(run, recorder), module_of(run)
    sampler = DistributedSampler(
        Labelled(all_labelled=run.usual),
        **trainer.strategy.distributed_sampler_kwargs,
        shuffle=False,
    )
    loader = DataLoader(
        sampler.dataset, batch_size=BATCH // run.accumulate // sampler.num_replicas, sampler=sampler
    )
    trainer.fit(module, loader, loader, ckpt_path=run.resume)
    if run.save is not None:
        trainer.save_checkpoint(run.save)
    return {
        "norms": recorder.norms,
        "logged": recorder.logged,
        "replicas": sampler.num_replicas,
        "held": recorder.held,
        "initial": recorder.initial,
        "final": trainer.strategy.gather_state_dict(),
    }
