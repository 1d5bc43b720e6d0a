"""On a GPU every reading of a value waits for all that was queued before: a step reads equally often, however many microbatches it has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_ptdp.engine.engine import Engine
from tests.conformance.toys import Place, make_trainer

READS = ("tolist", "item", "__float__", "__int__", "__bool__", "__index__", "numpy")


class LitTokens(pl.LightningModule):
    """Counts its tokens, and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        loss = self.layer(batch).square().mean()
        self.log("train_loss", loss)
        self.log("largest", batch.max(), reduce_fx="max")
        return {"loss": loss, "num_tokens": (batch > 0).sum()}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@contextlib.contextmanager
def reads_of_steps(reads: list[str]) -> Iterator[None]:
    """What is read in this context while the engine runs a step under its schedule."""
    run, inside = Engine._run, []

    def running(*args: Any) -> Any:
        inside.append(True)
        try:
            return run(*args)
        finally:
            inside.pop()

    def noting(name: str) -> Any:
        read = getattr(Tensor, name)

        def noted(tensor: Tensor, *args: Any) -> Any:
            if inside:
                reads.append(name)
            return read(tensor, *args)

        return mock.patch.object(Tensor, name, noted)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Engine, "_run", running))
        for name in READS:
            stack.enter_context(noting(name))
        yield


def reads(num_microbatches: int) -> list[str]:
    trainer = make_trainer(Place(world_size=1, layout={"num_microbatches": num_microbatches}), max_steps=1)
    found: list[str] = []
    torch.manual_seed(0)
    with reads_of_steps(found):
        trainer.fit(LitTokens(), torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=12))
    return found


@pytest.mark.parametrize("num_microbatches", [2, 6])
def test_a_step_reads_its_device_once(num_microbatches: int) -> None:
    assert reads(num_microbatches) == ["tolist"]
