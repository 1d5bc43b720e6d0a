"""Behaviours 7, 10 to 12 and 32: parameter groups, schedulers, accumulation, clipping and precision
match Lightning."""

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
)
from lightning.pytorch.loggers import CSVLogger

from lightning_ptdp.checkpoint.save_agreement import own_rank
from tests.conformance.toys import (
    PLACES,
    LitNet,
    loader,
    make_trainer,
    weights,
)

pytestmark = pytest.mark.thorough

ALL = ["one", "d2", "p2"]


class LitGroups(LitNet):
    """Two parameter groups with a selectable scheduler."""

    def __init__(self, schedule: str) -> None:
        super().__init__()
        self.schedule = schedule

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.SGD(
            [
                {"params": matrices, "weight_decay": 0.1, "lr": 0.1},
                {"params": vectors, "momentum": 0.9},
            ],
            lr=0.05,
        )
        schedulers = torch.optim.lr_scheduler
        if self.schedule == "plateau":
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
            }
        scheduler = schedulers.ExponentialLR(optimizer, 0.8)
        return [optimizer], [
            {
                "scheduler": scheduler,
                "interval": self.schedule,
                "frequency": 2 if self.schedule == "step" else 1,
            }
        ]


def run(rank, place, module, settings, callbacks):
    trainer = make_trainer(place, callbacks=[*callbacks], **({"max_epochs": 3} | settings))
    trainer.fit(module(), loader(), loader())
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return {"weights": weights(trainer), "steps": trainer.global_step, "rates": rates}


class Plateau(LitGroups):
    def __init__(self):
        super().__init__("plateau")


class EachStep(LitGroups):
    def __init__(self):
        super().__init__("step")


class EachEpoch(LitGroups):
    def __init__(self):
        super().__init__("epoch")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("module", [Plateau, EachStep, EachEpoch])
def test_parameter_groups_and_schedulers_match_lightning(name, module, conformance):
    for _, expected in conformance.check(run, name, module, {}, []):
        assert expected["rates"][0] < 0.1, "the scheduler did nothing"


SETTINGS = {
    "accumulation schedule": ({}, [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})]),
    "accumulation over the end of an epoch": ({"accumulate_grad_batches": 3}, []),
    "clip by norm": ({"gradient_clip_val": 0.05}, []),
    "clip by value": ({"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}, []),
    "clip and accumulate": ({"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}, []),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("settings", SETTINGS)
def test_accumulation_and_clipping_match_lightning(name, settings, conformance):
    conformance.check(run, name, EachStep, *SETTINGS[settings])


class OnlyMatrices(LitNet):
    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.dim() > 1], lr=0.1)


@pytest.mark.parametrize("name", [*ALL, "d2 m2 sharded"])
def test_clipping_uses_optimizer_parameters_only(name, conformance):
    conformance.check(run, name, OnlyMatrices, {"gradient_clip_val": 0.05, "max_epochs": 1}, [])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("32-true", 1e-5), ("64-true", 1e-10), ("bf16-mixed", 2e-2), ("bf16-true", 5e-2)],
)
def test_precision_matches_lightning(name, precision, tolerance, conformance):
    settings = {"precision": precision, "max_epochs": 1}
    conformance.check(run, name, EachStep, settings, [], tolerance=tolerance)


def monitor_rates(rank, place, path):
    monitor = LearningRateMonitor(logging_interval="step")
    trainer = make_trainer(place, callbacks=[monitor], logger=CSVLogger(path, name=place.folder))
    trainer.fit(EachStep(), loader())
    return monitor.lrs


@pytest.mark.parametrize("name", ["p2"])
def test_learning_rate_monitor_matches_lightning(name, conformance, tmp_path):
    for found, expected in conformance.pairs(monitor_rates, name, str(tmp_path)):
        assert found == expected
        assert len(found) == 2, "expected one curve per parameter group"


class LitInfinite(LitNet):
    """The loss of the last rank's replica is infinite at the seventh batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("agreed_loss", loss * self.factor(), sync_dist=True, on_step=False, on_epoch=True)
        return loss * self.factor()

    def factor(self):
        last = own_rank() == self.trainer.world_size - 1
        return (
            float("inf") if self.trainer.fit_loop.epoch_loop.total_batch_idx == 6 and last else 1.0
        )


def meet_infinity(rank, place):
    L.seed_everything(1, verbose=False)
    stop = EarlyStopping(
        "agreed_loss", check_finite=True, check_on_train_epoch_end=True, patience=100
    )
    trainer = make_trainer(place, callbacks=[stop], gradient_clip_val=1.0, max_epochs=9)
    trainer.fit(LitInfinite(), loader())
    broken = sorted(name for name, value in weights(trainer).items() if not value.isfinite().all())
    return trainer.global_step, stop.stopped_epoch, broken, len(weights(trainer))


@pytest.mark.parametrize("name", ["d2", "p2"])
def test_infinite_loss_on_one_rank_affects_all_ranks(name, pool):
    ranks = pool.run(meet_infinity, world_size=2, args=(PLACES[name][0],))
    step, stopped_epoch, broken, total = ranks[0]
    assert ranks[1] == ranks[0]
    assert 6 < step < 18
    assert stopped_epoch > 0
    assert len(broken) == total, "clipping by an infinite norm must give the same on all ranks"
