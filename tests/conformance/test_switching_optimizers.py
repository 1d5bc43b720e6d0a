"""Optimizers that train and evaluate at different weights, as Schedule-Free (arXiv 2405.15682).

Their ``eval`` and ``train`` exchange the weights, and are called in hooks.
"""

from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.letters import M, P, V, Z
from tests.parity import Training

WIDTH = 8


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-Free SGD: the parameters are ``y`` in training, and the average ``x`` else."""

    def __init__(self, parameters, lr, beta=0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "trains": False})

    def _exchange(self, trains: bool, weight) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["trains"] != trains else ():
                if "z" in self.state[parameter]:
                    parameter.data.lerp_(self.state[parameter]["z"], weight(group["beta"]))
            group["trains"] = trains

    def train(self) -> None:
        self._exchange(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._exchange(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure()
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("call train() first")
            group["k"] += 1
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.clone())
                y.lerp_(z, 1 / group["k"])
                y.sub_(y.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"])))
                z.sub_(y.grad, alpha=group["lr"])
        return loss


class LitSwitching(L.LightningModule):
    """Calls the optimizer through Lightning's wrapper, or directly."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.blocks(batch), batch.flip(1))

    def validation_step(self, batch, batch_idx):
        self.log("error", F.mse_loss(self.blocks(batch), batch.flip(1)), sync_dist=True)

    def configure_optimizers(self):
        return ScheduleFree(self.parameters(), lr=0.5)

    def optimizer(self):
        return self.optimizers(use_pl_optimizer=self.wrapped)

    def on_train_start(self):
        self.optimizer().train()

    def on_validation_start(self):
        self.optimizer().eval()

    def on_validation_end(self):
        self.optimizer().train()

    def on_train_end(self):
        self.optimizer().eval()


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    wrapped: bool = True
    steps: int = 6
    validate_every: int | None = 2

    always_clips: ClassVar[bool] = False

    def make_module(self):
        return LitSwitching(self.wrapped)

    def make_data(self):
        return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2))


LAYOUTS = {
    "d2": (2, {}),
    "d2 zero 1": (2, {Z: "optimizer"}),
    "d2 zero 2": (2, {Z: "gradients"}),
    "d2 zero 3": (2, {Z: "parameters"}),
    "d2 offload": (2, {"offload_optimizer": True}),
    "p2 v2 zero 1": (4, {P: 2, V: 2, M: 2, Z: "optimizer"}),
}


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_exchanged_weights_match_single_process(name, wrapped, parity):
    parity.check(Run(wrapped=wrapped), LAYOUTS[name])
