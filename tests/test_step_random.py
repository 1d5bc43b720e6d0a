"""Random numbers of torch, numpy and Python in training steps, equal in every layout."""

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_ptdp.engine.step_random import StepRandomness
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.tensor_parallel import ParallelPlan
from tests.letters import C, M, P, R, S, T, V
from tests.parity import Training

pytestmark = pytest.mark.thorough

SAMPLES, LENGTH, WIDTH, HEADS = 8, 8, 16, 2


class Block(nn.Module):
    """Attention block with dropout and noise from all generators."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.draws = draws

    def forward(self, x, strength):
        q, k, v = (
            part.unflatten(-1, (-1, 8)).transpose(1, 2)
            for part in (self.q(x), self.k(x), self.v(x))
        )
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        if self.draws:
            y = (
                F.dropout(y, 0.3, self.training) * (0.5 + random.random())
                + float(np.random.normal()) * 0.1
            )
        return x + y / strength


class LitDrawing(L.LightningModule):
    """Denoising module with masks, times, noise and mixup."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(draws) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def loss(self, x):
        mixed = float(np.random.beta(0.4, 0.4))
        x = mixed * x + (1 - mixed) * x[torch.randperm(len(x))]
        time = torch.rand(len(x), 1, 1)
        noise = torch.randn_like(x)
        mask = torch.rand(x.shape[:2]) < 0.7
        scale = random.uniform(0.5, 2.0)
        y = self.drop(self.enter((1 - time) * x + time * noise)) * mask.unsqueeze(-1)
        for block in self.blocks:
            # random numbers between blocks
            y = block(y, 0.5 + random.random() + float(torch.rand(())) + abs(np.random.normal()))
        y = self.drop(y.flatten(0, 1)).view_as(y)
        y = self.head(y) * scale + 0.1 * torch.rand(len(x), 1, 1)
        return F.mse_loss(y, noise)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch["x"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch["x"]), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.loss(batch["x"])[None].expand(len(batch["x"]))

    def configure_parallel(self):
        return ParallelPlan(
            blocks="blocks", tensor={"blocks.*.[qkv]": "column", "blocks.*.out": "row"}
        )

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class OwnGenerators(L.Callback):
    """Callback that asserts that training does not use the process's own generators."""

    def on_train_batch_start(self, *_):
        self.before = self._state()

    def on_train_batch_end(self, *_):
        assert self._state() == self.before

    def _state(self):
        return (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        )


@dataclass(frozen=True, kw_only=True)
class Drawing(Training):
    """Training with random numbers, also in the blocks if ``block_draws``."""

    layout: dict[str, Any] = field(default_factory=lambda: {M: 4})
    steps: int = 3
    block_draws: bool = True

    tolerance: ClassVar[float] = 2e-5
    weight_tolerance: ClassVar[float] = 1e-4
    trainer_options: ClassVar[dict[str, Any]] = {
        "limit_val_batches": 2,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }

    def make_module(self):
        return LitDrawing(self.block_draws)

    def make_strategy(self):
        return PTDPStrategy(seed=7, **self.layout)

    def make_callbacks(self):
        return [OwnGenerators()]

    def make_loaders(self, trainer):
        # Each rank's generators start in a different state.
        random.seed(trainer.global_rank)
        np.random.seed(trainer.global_rank)
        x = torch.randn(4, SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5))
        replicas, replica = (
            trainer.strategy.distributed_sampler_kwargs[key] for key in ("num_replicas", "rank")
        )
        rows = [{"x": row} for batch in x for row in batch.chunk(replicas)[replica]]
        return [DataLoader(rows, batch_size=SAMPLES // replicas)]

    def results(self, trainer, module):
        (loader,) = self.make_loaders(trainer)
        (validated,) = trainer.validate(module, loader, verbose=False)
        predicted = trainer.predict(module, loader) if self.block_draws else []
        return {
            "val": validated["val_loss"],
            "predicted": [float(batch.mean()) for batch in predicted],
        }


LAYOUTS = {
    "p2": (2, {P: 2}),
    "p2v2": (2, {P: 2, V: 2}),
    "p4": (4, {P: 4}),
    "p2 recomputed": (2, {P: 2, R: "full"}),
    "p2 zb_v": (2, {P: 2, V: 2, S: "zb_v"}),
    "one recomputed": (1, {R: "full"}),
    "d2 m2": (2, {M: 2}),
    "d2": (2, {M: 1}),
    "d2 p2 m2": (4, {P: 2, M: 2}),
    "t2 m4": (2, {T: 2}),
    "t2 p2": (4, {T: 2, P: 2}),
    "c2 m4": (2, {C: 2, "context_parallel_positions": False}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_numbers_match_single_process(name, parity):
    training = Drawing(block_draws=name[0] not in "tc", layout={M: 2 if name == "d2" else 4})
    ranks = parity.check(training, LAYOUTS[name])
    if "d2" not in name:
        assert len({rank["val"] for rank in ranks}) == 1, (
            "ranks evaluate with different random numbers"
        )
        assert all(rank["predicted"] == ranks[0]["predicted"] for rank in ranks)
    predicted = ranks[0]["predicted"]
    assert len(set(predicted)) == len(predicted), "batches have equal random numbers"


class _Missing:
    """Stand-in for a missing package that raises on every attribute, like monai's."""

    def __getattribute__(self, name):
        raise ImportError("not installed")


def test_stand_ins_for_missing_packages_are_ignored(monkeypatch):
    monkeypatch.setitem(globals(), "optional", _Missing())
    StepRandomness(
        module=nn.Sequential(Block(True)),
        blocks={0: "0"},
        absent=(),
        place=(),
        device=torch.device("cpu"),
    )
