"""Parameters that only some steps, replicas or microbatches use, or none at all.

An optimizer with momentum and weight decay leaves a parameter without a gradient as it is, but moves
one with a zero gradient.
"""

from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.letters import D, M, P, S, V, Z
from tests.parity import Training

WIDTH = 8


class LitBranches(L.LightningModule):
    """A model with a branch that ``uses`` decides on, and one that no step uses."""

    def __init__(self, uses) -> None:
        super().__init__()
        self.uses = uses
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.branch, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch, batch_idx):
        x = self.blocks(batch)
        chosen = self.uses(self.trainer.global_step, batch)
        if chosen.any():
            x = x + chosen * self.branch(x)
        return F.mse_loss(x, batch.flip(1))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)


USES = {
    "every other step": lambda step, batch: torch.tensor(step % 2 == 0),
    "later": lambda step, batch: torch.tensor(step > 0),
    "some samples": lambda step, batch: batch[:, :1] > 1.2,
}


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    uses: str = "every other step"
    steps: int = 6
    precision: str = "64-true"

    always_clips: ClassVar[bool] = False
    smallest: ClassVar[float] = 1e-9

    def make_module(self):
        return LitBranches(USES[self.uses])

    def make_data(self):
        return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2))


LAYOUTS = {
    "m2": (1, {M: 2}),
    "d2": (2, {}),
    "d2 zero 1": (2, {Z: "optimizer"}),
    "d2 zero 2": (2, {Z: "gradients"}),
    "d2 zero 3": (2, {Z: "parameters"}),
    "d2 offload": (2, {"offload_optimizer": True}),
    "d2 finite": (2, {"check_finite": "raise"}),
    "p2 zb": (2, {P: 2, M: 4, S: "zb_h1"}),
    "d2 p2 v2 zero 1": (4, {P: 2, V: 2, M: 2, Z: "optimizer"}),
    "d4 two levels": (4, {D: 2, Z: "optimizer"}),
}


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_parameter_without_gradient_stays_as_in_single_process(name, uses, parity):
    parity.check(Run(uses=uses), LAYOUTS[name])


@pytest.mark.parametrize("name", ["m2", "d2", "d2 zero 2", "p2 zb"])
def test_parameter_used_in_one_of_two_accumulated_batches_is_stepped(name, parity):
    run = Run(uses="some samples", accumulate=2, clip=0.5)
    parity.check(run, LAYOUTS[name])


def test_some_replicas_and_microbatches_lack_the_branch():
    """Otherwise the samples above would decide nothing."""
    batches = Run().make_data()[:48].view(6, 2, 2, 2, WIDTH)  # steps, replicas, microbatches
    used = (batches[..., 0] > 1.2).any(-1)
    replicas = used.any(-1)
    assert (replicas.any(-1) & ~replicas.all(-1)).any()
    assert (~replicas.any(-1)).any()
    assert (used.any(-1) & ~used.all(-1)).any()


class LitSkips(LitBranches):
    """Replica r has the samples r, r + 2, ... and leaves out other blocks than the other replica."""

    skipped: ClassVar[tuple[tuple[int, ...], ...]] = ((3,), (0, 1))

    def training_step(self, batch, batch_idx):
        place = self.trainer.strategy.distributed_sampler_kwargs
        if place["num_replicas"] == 2:
            return self.loss(batch, self.skipped[place["rank"]])
        return (
            self.loss(batch[::2], self.skipped[0]) + self.loss(batch[1::2], self.skipped[1])
        ) / 2

    def loss(self, batch, skipped):
        x = batch
        for number, block in enumerate(self.blocks):
            if number not in skipped:
                x = block(x)
        return F.mse_loss(x, batch.flip(1))


@dataclass(frozen=True, kw_only=True)
class Skips(Run):
    def make_module(self):
        return LitSkips(USES["later"])


@pytest.mark.parametrize(
    "layout", [{}, {Z: "optimizer"}, {Z: "parameters", "reshard_after": "step"}]
)
def test_replicas_that_skip_different_blocks_match_single_process(layout, parity):
    parity.check(Skips(), (2, layout))
