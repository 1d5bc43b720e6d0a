"""Overridden ``optimizer_step`` and ``optimizer_zero_grad`` work as Lightning documents."""

import pytest
import torch

from lightning_ptdp import ParallelPlan
from tests.conformance.toys import (
    PLACES,
    LitNet,
    Place,
    assert_weights,
    loader,
    make_trainer,
    weights,
)

pytestmark = pytest.mark.thorough

EVERYWHERE = list(PLACES)


class LitPlain(LitNet):
    """Records the gradient norm in ``on_after_backward``."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_after_backward(self):
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.seen.append(float(torch.nn.utils.get_total_norm(gradients)))

    def configure_optimizers(self):
        groups = [
            {"params": [p for p in self.parameters() if (p.dim() > 1) is matrices]}
            for matrices in (True, False)
        ]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.5)


class LitEverySecond(LitPlain):
    """From Lightning's documentation of ``optimizer_step``."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class LitKeeps(LitPlain):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        """Keep the gradients, so that each step uses the sum of all so far."""


class LitTells(LitPlain):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.seen.append(float(batch_idx))
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


class LitZeroes(LitPlain):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


class LitPartly(LitEverySecond):
    """Clears all gradients every third batch, and those of the first group always."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 3 == 0:
            optimizer.zero_grad()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = None


class LitDrops(LitPlain):
    """Drops the gradients of one batch of an accumulation window, as users do with NaN."""

    def on_after_backward(self):
        super().on_after_backward()
        if self.trainer.fit_loop.epoch_loop.batch_idx == 0:
            self.zero_grad()


def run(rank, place, module, settings):
    lit = module()
    trainer = make_trainer(place, **({"max_epochs": 2} | settings))
    trainer.fit(lit, loader())
    return weights(trainer), lit.seen


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("module", [LitEverySecond, LitKeeps, LitTells, LitZeroes, LitPartly])
def test_gradients_are_cleared_like_in_lightning(module, name, conformance):
    pairs = conformance.pairs(run, name, module, {"gradient_clip_val": 0.3})
    for (found, seen), (expected, seen_by_lightning) in pairs:
        assert_weights(found, expected)
        if name in ("one", "d2", "one m2", "d2 m2"):
            assert seen == pytest.approx(seen_by_lightning, rel=1e-4)


@pytest.mark.parametrize(
    ("module", "name", "max_epochs"),
    [
        *((module, name, 3) for module in (LitKeeps, LitPartly) for name in EVERYWHERE),
        *((LitDrops, name, 2) for name in ("one m2", "d2", "p2")),
    ],
)
def test_accumulation_over_uncleared_gradients(module, name, max_epochs, conformance):
    settings = {"accumulate_grad_batches": 2, "max_epochs": max_epochs}
    for (found, _), (expected, _) in conformance.pairs(run, name, module, settings):
        assert_weights(found, expected)


@pytest.mark.parametrize("name", ["p2", "one m2", "d2 m2 sharded"])
@pytest.mark.parametrize(
    ("module", "precision"),
    [(LitEverySecond, "16-true"), (LitKeeps, "bf16-true"), (LitZeroes, "16-true")],
)
def test_overridden_hooks_with_master_weights(module, precision, name, conformance):
    place, reference = PLACES[name]
    # Lightning's own strategy has no master weights and no loss scale
    whole = Place(world_size=reference.world_size)
    settings = {"precision": precision, "accumulate_grad_batches": 1}
    for (found, _), (expected, _) in conformance.pairs(run, (place, whole), module, settings):
        assert_weights(found, expected, tolerance=2e-2)


class LitBackward(LitNet):
    calls = 0

    def configure_parallel(self):
        return ParallelPlan(tensor={"net.2": "column", "net.4": "row"})

    def backward(self, loss):
        self.calls += 1
        loss.backward()


def run_backward(rank, place):
    trainer, module = make_trainer(place), LitBackward()
    trainer.fit(module, loader())
    assert module.calls == trainer.global_step
    return weights(trainer)


def test_overridden_backward_runs_under_tensor_parallelism(conformance):
    place = Place(world_size=2, layout={"tensor_parallel_size": 2})
    conformance.check(run_backward, place)
