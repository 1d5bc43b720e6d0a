"""A mixture that anybody would write, and one training of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_ptdp import ParallelPlan, PTDPStrategy

VOCABULARY, WIDTH, EXPERTS, LENGTH = 29, 8, 4, 6


class Experts(nn.Module):
    """All experts of a layer, (n, h), (n, k), (n, k) -> (n, h)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * WIDTH, dtype=torch.float64))
        self.down = nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, WIDTH, dtype=torch.float64))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=0.3)
        nn.init.normal_(self.down, std=0.3)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, place = (index == expert).nonzero(as_tuple=True)
            made = F.gelu(x[token] @ self.up[expert]) @ self.down[expert]
            result = result.index_add(0, token, made * weights[token, place, None])
        return result


class Block(nn.Module):
    """A router of two experts a token, and the experts. ``routing``: "own", or where it is told to
    send all tokens."""

    def __init__(self, routing: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False, dtype=torch.float64)
        self.experts, self.routing = Experts(), routing

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores = self.router(flat).softmax(-1)
        weights, index = scores.topk(2, -1)
        if self.routing == "one":  # all to one expert: the ranks of the others get nothing
            index = torch.full_like(index[:, :1], EXPERTS - 1)
            weights = scores.gather(1, index)
        elif self.routing == "nowhere":
            index = index + EXPERTS - 1
        elif self.routing == "nan":
            weights = weights / 0.0 * 0.0
        return x + self.experts(flat, index, weights).view_as(x)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training."""

    world_size: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    routing: str = "own"
    steps: int = 6
    clip: float = 0.3
    save: str | None = None
    resume: str | None = None
    plan: bool = True
    uneven: bool = False


class LitMixture(L.LightningModule):
    """Nothing in it knows of ranks."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def configure_model(self) -> None:
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(Block(self.run.routing) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)

    def configure_parallel(self) -> ParallelPlan:
        return ParallelPlan(
            blocks="layers", tensor={"layers.*.experts": "experts"} if self.run.plan else {}
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def _loss(self, batch: list[Tensor]) -> Tensor:
        x = self.embedding(batch[0][:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[0][:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class Recorder(L.Callback):
    """The norm of every step, and the weights at the start."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.initial: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.initial = trainer.strategy.gather_state_dict()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.norms.append(float(trainer.strategy.gradient_norm))


def trainer_of(run: Run, *callbacks: L.Callback) -> L.Trainer:
    return L.Trainer(
        strategy=PTDPStrategy(**run.layout),
        accelerator="cpu",
        devices=run.world_size,
        max_steps=run.steps,
        logger=False,
        gradient_clip_val=run.clip,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=run.steps,
        check_val_every_n_epoch=None,
        use_distributed_sampler=False,
    )


def fit(rank: int, run: Run) -> dict[str, Any]:
    """Train; norms, validation loss, and the initial and the final weights of the whole model."""
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    trainer = trainer_of(run, recorder)
    ids = torch.randint(VOCABULARY, (48, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    sampler = DistributedSampler(
        TensorDataset(ids), **trainer.strategy.distributed_sampler_kwargs, shuffle=False
    )
    loader = DataLoader(sampler.dataset, batch_size=8 // sampler.num_replicas, sampler=sampler)
    uneven = DataLoader(TensorDataset(ids[: 4 + 4 * sampler.rank]), batch_size=4)
    trainer.fit(LitMixture(run), loader, uneven if run.uneven else loader, ckpt_path=run.resume)
    if run.save is not None:
        trainer.save_checkpoint(run.save)
    return {
        "norms": recorder.norms,
        "validation": float(trainer.callback_metrics["val_loss"]),
        "initial": recorder.initial,
        "final": trainer.strategy.gather_state_dict(),
        "numbers": sum(
            parameter.numel()
            for name, parameter in trainer.lightning_module.named_parameters()
            if "experts" in name
        ),
    }
