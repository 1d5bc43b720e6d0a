"""Training of our GPT with experts, on sequences with unequal numbers of labels."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import Dataset

from lightning_ptdp import ParallelPlan
from lightning_ptdp.models import GPT, AdamWConfig, GPTConfig, LitGPT, gpt_plan
from tests.parity import Training

VOCABULARY, LENGTH, SAMPLES = 29, 8, 48

EXPERTS = {
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_hidden_size": 12,
    "z_loss_coefficient": 0.05,
}


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    """Training run of a GPT with experts in float64."""

    model: dict[str, Any] = field(default_factory=dict)
    usual: bool = False
    steps: int = 3
    clip: float | None = 0.3
    precision: str = "64-true"
    validate_every: int | None = 6

    weight_tolerance: ClassVar[float] = 8e-9

    def make_module(self) -> L.LightningModule:
        if self.usual:
            return LitUsual(config_of(self))
        optimizer = AdamWConfig(learning_rate=1e-2, warmup_steps=1, eps=1e-3)
        return LitGPT(config_of(self), optimizer)

    def make_data(self) -> Dataset:
        return Labelled(all_labelled=self.usual)

    def make_callbacks(self) -> list[L.Callback]:
        return [Held()]

    def results(self, trainer: Any, module: Any) -> dict[str, Any]:
        (held,) = (one.counts for one in trainer.callbacks if isinstance(one, Held))
        return {"held": held}


class Labelled(Dataset):
    """Sequences with labels on the first few tokens or on all; one sequence may have no label."""

    def __init__(self, *, all_labelled: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
        self.lengths = torch.randint(1, LENGTH + 1, (SAMPLES,), generator=generator)
        self.lengths[5] = 0
        if all_labelled:
            self.lengths[:] = LENGTH

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index):
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

    def configure_model(self):
        self.model = GPT(self.config)

    def configure_parallel(self) -> ParallelPlan:
        return gpt_plan(self.config)

    def training_step(self, batch, batch_idx):
        logits, aux_b3 = self.model(batch["input_ids"], auxiliary=True)
        balance, square, _ = aux_b3.mean(0)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss)
        return loss + 0.2 * balance + 0.02 * square

    def on_before_optimizer_step(self, optimizer):
        self.model.balance(
            partial(self.trainer.strategy.reduce, group=dist.group.WORLD, reduce_op="sum")
        )

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class Held(L.Callback):
    """Counts the elements of expert parameters, gradients and optimizer states on this rank."""

    def __init__(self):
        self.counts: dict[str, int] = {}

    def on_before_optimizer_step(self, trainer, module, optimizer):
        parameters = [
            parameter for name, parameter in module.named_parameters() if "experts" in name
        ]
        states = [
            value for each in parameters for value in optimizer.state[each].values() if value.dim()
        ]
        # gradients are None with a sharded optimizer
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        found = {"parameters": parameters, "gradients": gradients, "states": states}
        self.counts = {
            what: sum(tensor.numel() for tensor in tensors) for what, tensors in found.items()
        }
