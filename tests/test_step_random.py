"""A step that draws random numbers trains the same in every layout: masks, noise and mixup of
torch, numpy and Python, and in blocks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptdp.engine.step_random import StepRandomness
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.tensor_parallel import ParallelPlan
from tests.parity import make_trainer
from tests.pool import Pool

pytestmark = pytest.mark.thorough

SAMPLES, LENGTH, WIDTH, HEADS = 8, 8, 16, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout on some processes, with the one process that must train the same."""

    size: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=lambda: {"num_microbatches": 4})
    block_draws: bool = True


class Block(nn.Module):
    """Attention that drops whole updates, and noise of all generators."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.draws = draws

    def forward(self, x: Tensor, strength: float) -> Tensor:
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
    """Denoising with masks, times, noise, mixup and layer drop."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(draws) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.drawn: list[float] = []

    def loss(self, x: Tensor) -> Tensor:
        mixed = float(np.random.beta(0.4, 0.4))
        x = mixed * x + (1 - mixed) * x[torch.randperm(len(x))]
        time = torch.rand(len(x), 1, 1)
        noise = torch.randn_like(x)
        mask = torch.rand(x.shape[:2]) < 0.7
        scale = random.uniform(0.5, 2.0)
        y = self.drop(self.enter((1 - time) * x + time * noise)) * mask.unsqueeze(-1)
        for block in self.blocks:
            # drawn between blocks
            y = block(y, 0.5 + random.random() + float(torch.rand(())) + abs(np.random.normal()))
        y = self.head(y) * scale + 0.1 * torch.rand(len(x), 1, 1)
        self.drawn.append(float(noise.sum() + time.sum()) + scale + mixed)
        return F.mse_loss(y, noise)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch["x"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch["x"]), sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch["x"])[None].expand(len(batch["x"]))

    def configure_parallel(self) -> ParallelPlan:
        return ParallelPlan(
            blocks="blocks", tensor={"blocks.*.[qkv]": "column", "blocks.*.out": "row"}
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Losses(L.Callback):
    """Losses, and whether training drew from the process's own generators."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.before = (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        )

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.values.append(float(outputs["loss"]))
        assert (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        ) == self.before


def fit(rank: int, case: Case) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    module, losses = LitDrawing(case.block_draws), Losses()
    # This rank's process has drawn something else before.
    random.seed(rank)
    np.random.seed(rank)
    trainer = make_trainer(
        PTDPStrategy(seed=7, **case.layout),
        case.size,
        max_steps=3,
        limit_val_batches=2,
        callbacks=[losses],
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    x = torch.randn(4, SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5))
    replicas, replica = (
        trainer.strategy.distributed_sampler_kwargs[key] for key in ("num_replicas", "rank")
    )
    rows = [{"x": row} for batch in x for row in batch.chunk(replicas)[replica]]
    loader = DataLoader(rows, batch_size=SAMPLES // replicas)
    trainer.fit(module, loader)
    (validated,) = trainer.validate(module, loader, verbose=False)
    predicted = (
        [float(batch.mean()) for batch in trainer.predict(module, loader)]
        if case.block_draws
        else []
    )
    final = trainer.strategy.gather_state_dict()
    return {
        "losses": losses.values,
        "final": final,
        "val": validated["val_loss"],
        "predicted": predicted,
        "drawn": module.drawn,
    }


P2 = {"pipeline_parallel_size": 2, "num_microbatches": 4}
CASES = {
    "p2": Case(size=2, layout=P2),
    "p2v2": Case(size=2, layout={**P2, "virtual_pipeline_size": 2}),
    "p4": Case(size=4, layout={**P2, "pipeline_parallel_size": 4}),
    "p2 recomputed": Case(size=2, layout={**P2, "recompute": "full"}),
    "p2 zb_v": Case(size=2, layout={**P2, "virtual_pipeline_size": 2, "schedule": "zb_v"}),
    "one recomputed": Case(layout={"num_microbatches": 4, "recompute": "full"}),
    "d2 m2": Case(size=2, layout={"num_microbatches": 2}),
    "d2": Case(size=2, reference={"num_microbatches": 2}),
    "d2 p2 m2": Case(size=4, layout={**P2, "num_microbatches": 2}),
    "t2 m4": Case(
        size=2, layout={"tensor_parallel_size": 2, "num_microbatches": 4}, block_draws=False
    ),
    "t2 p2": Case(size=4, layout={**P2, "tensor_parallel_size": 2}, block_draws=False),
    "c2 m4": Case(
        size=2,
        layout={
            "context_parallel_size": 2,
            "num_microbatches": 4,
            "context_parallel_positions": False,
        },
        block_draws=False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_random_numbers_are_those_of_one_process(name: str, pool: Pool) -> None:
    case = CASES[name]
    ranks = pool.run(fit, world_size=case.size, args=(case,))
    (expected,) = pool.run(
        fit, world_size=1, args=(Case(layout=case.reference, block_draws=case.block_draws),)
    )
    replicas = 2 if name.startswith("d2") else 1
    losses = np.mean([ranks[index]["losses"] for index in range(replicas)], axis=0)
    np.testing.assert_allclose(losses, expected["losses"], rtol=2e-5)
    for key, value in expected["final"].items():
        torch.testing.assert_close(
            ranks[-1]["final"][key],
            value,
            rtol=1e-3,
            atol=1e-4,
            msg=lambda text, k=key: f"{k}: {text}",
        )


@pytest.mark.parametrize("name", ["p2", "p2v2", "t2 m4"])
def test_evaluation_draws_alike_on_all_stages(name: str, pool: Pool) -> None:
    case = CASES[name]
    ranks = pool.run(fit, world_size=case.size, args=(case,))
    assert len({rank["val"] for rank in ranks}) == 1
    assert ranks[0]["predicted"] == ranks[1]["predicted"]
    assert len(set(ranks[0]["predicted"])) == len(ranks[0]["predicted"]), (
        "batches share their random numbers"
    )


class _Missing:
    """A stand-in for an optional package, as monai's, which raises whatever is read of it."""

    def __getattribute__(self, name: str) -> object:
        raise ImportError("not installed")


def test_stand_ins_for_optional_packages_are_no_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "optional", _Missing())
    StepRandomness(
        module=nn.Sequential(Block(True)),
        blocks={0: "0"},
        absent=(),
        place=(),
        device=torch.device("cpu"),
    )
