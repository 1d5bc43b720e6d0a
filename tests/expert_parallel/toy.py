"""A typical user's mixture of experts, and its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptdp import ParallelPlan
from tests.parity import Training

VOCABULARY, WIDTH, EXPERTS, LENGTH = 29, 8, 4, 6


class Experts(nn.Module):
    """All experts of a layer: (n, h), (n, k), (n, k) -> (n, h)."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * WIDTH, dtype=torch.float64))
        self.down = nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, WIDTH, dtype=torch.float64))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=0.3)
        nn.init.normal_(self.down, std=0.3)

    def forward(self, x, index, weights):
        result = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, place = (index == expert).nonzero(as_tuple=True)
            made = F.gelu(x[token] @ self.up[expert]) @ self.down[expert]
            result = result.index_add(0, token, made * weights[token, place, None])
        return result


class Block(nn.Module):
    """A router with two experts per token, and the experts.

    ``routing`` is "own", "one" (all tokens to one expert), "nowhere" (no such expert) or "nan"."""

    def __init__(self, routing: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False, dtype=torch.float64)
        self.experts, self.routing = Experts(), routing

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores = self.router(flat).softmax(-1)
        weights, index = scores.topk(2, -1)
        if self.routing == "one":  # the ranks of the other experts get no token
            index = torch.full_like(index[:, :1], EXPERTS - 1)
            weights = scores.gather(1, index)
        elif self.routing == "nowhere":
            index = index + EXPERTS - 1
        elif self.routing == "nan":
            weights = weights / 0.0 * 0.0
        return x + self.experts(flat, index, weights).view_as(x)


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    """Training run of the mixture in float64."""

    routing: str = "own"
    steps: int = 3
    clip: float | None = 0.3
    validate_every: int | None = 0
    plan: bool = True
    uneven: bool = False

    weight_tolerance: ClassVar[float] = 5e-9
    synced: ClassVar[tuple[str, ...]] = ("val_loss",)
    trainer_options: ClassVar[dict[str, Any]] = {
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }

    def make_module(self) -> LitMixture:
        return LitMixture(self)

    def make_data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randint(VOCABULARY, (48, LENGTH + 1), generator=generator))

    def make_loaders(self, trainer: L.Trainer) -> list[DataLoader]:
        loaders = super().make_loaders(trainer)
        if self.uneven:
            ids = self.make_data().tensors[0][: 4 + 4 * trainer.global_rank]
            loaders[1] = DataLoader(TensorDataset(ids), batch_size=4)
        return loaders

    def results(self, trainer: Any, module: Any) -> dict[str, Any]:
        experts = [one for name, one in module.named_parameters() if "experts" in name]
        return {"numbers": sum(parameter.numel() for parameter in experts)}


class LitMixture(L.LightningModule):
    """A module without code for distributed training, except its parallel plan."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def configure_model(self):
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(Block(self.run.routing) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)

    def configure_parallel(self) -> ParallelPlan:
        return ParallelPlan(
            blocks="layers", tensor={"layers.*.experts": "experts"} if self.run.plan else {}
        )

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def _loss(self, batch: list[Tensor]) -> Tensor:
        x = self.embedding(batch[0][:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[0][:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
