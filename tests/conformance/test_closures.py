"""Optimizers that evaluate a closure several times per step, such as LBFGS."""

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.conformance.toys import (
    ONE,
    P2,
    LitNet,
    Losses,
    Place,
    assert_weights,
    loader,
    make_trainer,
    weights,
)

pytestmark = pytest.mark.thorough

M4, D2M4 = (
    Place(layout={"num_microbatches": 4}),
    Place(world_size=2, layout={"num_microbatches": 4}),
)
D2, PIPELINE = Place(world_size=2), Place(world_size=2, layout=P2)


class Ascends(torch.optim.Optimizer):
    """Sharpness-aware minimization: uses the gradient at a point one step uphill."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure):
        closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
        moves = [0.05 * p.grad / norm for p in parameters]
        torch._foreach_add_(parameters, moves)
        loss = closure()
        torch._foreach_sub_(parameters, moves)
        for parameter in parameters:
            parameter.sub_(parameter.grad, alpha=0.1)
        return loss


class LitClosure(LitNet):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        x, y = batch
        counted = y > 0.2 if self.optimizer == "weighted" else torch.ones_like(y)
        loss = ((self.net(x) - y).square() * counted).sum() / counted.sum().clamp(min=1)
        return {"loss": loss, "num_tokens": counted.sum()} if self.optimizer == "weighted" else loss

    def configure_optimizers(self):
        if self.optimizer == "ascends":
            return Ascends(self.parameters())
        search = "strong_wolfe" if self.optimizer == "searching" else None
        return torch.optim.LBFGS(
            self.parameters(), lr=0.3, max_iter=5, history_size=4, line_search_fn=search
        )


def run(rank, place, optimizer, settings):
    losses = Losses()
    trainer = make_trainer(
        place, callbacks=[losses], **({"precision": "64-true", "max_epochs": 4} | settings)
    )
    # All samples form one batch, so their split over replicas does not matter.
    trainer.fit(LitClosure(optimizer), loader(batch_size=32 // place.world_size))
    return weights(trainer), losses.values


@pytest.mark.parametrize("place", [M4, D2, D2M4], ids=["m4", "d2", "d2m4"])
@pytest.mark.parametrize("optimizer", ["plain", "searching", "weighted", "ascends"])
def test_closure_optimizer_matches_single_process(optimizer, place, conformance):
    ((expected, losses),) = conformance.expected(run, ONE, optimizer, {})
    found = conformance.ranks(run, place, optimizer, {})
    for weights_of_rank, _ in found:
        assert_weights(weights_of_rank, expected, tolerance=1e-7)
    assert losses[-1] < losses[0]
    if optimizer != "weighted":
        assert torch.tensor([values for _, values in found]).mean(0).tolist() == pytest.approx(
            losses, rel=1e-5
        )


def stop_and_go_on(rank, place, folder):
    for epochs in (2, 4):
        L.seed_everything(1, verbose=False)
        save = ModelCheckpoint(dirpath=folder, save_last=True)
        trainer = make_trainer(
            place,
            precision="64-true",
            max_epochs=epochs,
            enable_checkpointing=True,
            callbacks=[save],
        )
        trainer.fit(
            LitClosure("plain"),
            loader(batch_size=32 // place.world_size),
            ckpt_path="last" if epochs == 4 else None,
        )
        assert trainer.global_step == epochs
    return weights(trainer)


@pytest.mark.parametrize("place", [ONE, M4, D2], ids=["one", "m4", "d2"])
def test_lbfgs_history_resumes_from_checkpoint(place, conformance, tmp_path):
    ((expected, _),) = conformance.expected(run, ONE, "plain", {})
    for found in conformance.ranks(stop_and_go_on, place, str(tmp_path)):
        assert_weights(found, expected, tolerance=1e-7)


def refuse(rank, place, optimizer, settings):
    with pytest.raises(ValueError) as error:
        run(rank, place, optimizer, settings)
    return str(error.value)


@pytest.mark.parametrize("optimizer", ["plain", "ascends"])
@pytest.mark.parametrize(
    ("place", "settings", "words"),
    [
        (PIPELINE, {}, ["pipeline", "data parallelism and microbatches only"]),
        (Place(world_size=2, layout={"shard": "optimizer"}), {}, ["shard='none'"]),
        (Place(), {"precision": "bf16-true"}, ["master_weights=False"]),
    ],
    ids=["p2", "sharded", "bfloat16"],
)
def test_closure_optimizer_is_refused_with_unsupported_options(
    optimizer, place, settings, words, conformance
):
    for message in conformance.ranks(refuse, place, optimizer, settings):
        assert ("LBFGS" if optimizer == "plain" else "Ascends") in message
        for word in words:
            assert word in message
