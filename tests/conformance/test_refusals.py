"""Behaviours 12, 17, 18 and 25: what a cut model cannot do is refused with the reason; without a cut it works as ever."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.conformance.toys import P2, LitNet, Place, assert_weights, both, loader, make_trainer, weights
from tests.pool import Pool

PIPELINE = Place(world_size=2, layout={**P2, "start_method": "fork"})


class LitManual(LitNet):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class LitTunable(LitNet):
    lr, batch_size = 0.1, 4

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("torch.multiprocessing.start_processes", refuse)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"callbacks": [StochasticWeightAveraging(1e-2)]}, ["StochasticWeightAveraging", "pipeline_parallel_size=1"]),
        ({"callbacks": [EMAWeightAveraging()]}, ["EMAWeightAveraging", "pipeline_parallel_size=1"]),
        ({"callbacks": [LearningRateFinder()]}, ["LearningRateFinder", "pipeline_parallel_size=1"]),
        ({"callbacks": [BatchSizeFinder()]}, ["BatchSizeFinder", "pipeline_parallel_size=1"]),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
def test_a_cut_model_refuses_before_it_starts(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(MisconfigurationException) as error:
        make_trainer(PIPELINE, **settings).fit(LitTunable(), loader())
    for word in words:
        assert word in str(error.value)


@pytest.mark.usefixtures("nothing_starts")
def test_float16_without_masters_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="'16-true' with master_weights=False"):
        make_trainer(Place(world_size=2, layout={"master_weights": False}), precision="16-true").fit(LitTunable(), loader())


@pytest.mark.usefixtures("nothing_starts")
def test_the_tuner_and_manual_optimization_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="LearningRateFinder"):
        Tuner(make_trainer(PIPELINE)).lr_find(LitTunable(), loader())
    with pytest.raises(MisconfigurationException, match="manual optimization"):
        make_trainer(PIPELINE).fit(LitManual(), loader())


def average(rank: int, place: Place, folder: str, callback: Any) -> Any:
    L.seed_everything(1, verbose=False)
    trainer = make_trainer(place, callbacks=[callback()], max_epochs=3)
    module = LitTunable()
    trainer.fit(module, loader())
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def swa() -> Any:
    return StochasticWeightAveraging(1e-2, swa_epoch_start=1)


@pytest.mark.parametrize("name", ["one", "d2"])
@pytest.mark.parametrize("callback", [EMAWeightAveraging, swa])
def test_weight_averaging_without_a_cut(name: str, callback: Any, pool: Pool) -> None:
    for found, expected in both(pool, average, name, callback):
        assert_weights(found, expected)


def find_rate(rank: int, place: Place, folder: str) -> Any:
    L.seed_everything(1, verbose=False)
    module = LitTunable()
    found = Tuner(make_trainer(place)).lr_find(module, loader(), num_training=20, min_lr=1e-4)
    return found.suggestion(), found.results["loss"]


def test_learning_rate_finder_without_a_cut(pool: Pool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for (rate, losses), (other_rate, other_losses) in both(pool, find_rate, "one"):
        assert rate == pytest.approx(other_rate)
        assert losses == pytest.approx(other_losses, rel=1e-5)


def profile(rank: int, place: Place, folder: str, path: str) -> Any:
    L.seed_everything(1, verbose=False)
    profiler = SimpleProfiler(dirpath=path, filename=f"profile{rank}{folder}")
    trainer = make_trainer(place, profiler=profiler)
    trainer.fit(LitNet(), loader())
    return sorted(profiler.recorded_durations), weights(trainer)


def test_profiler(pool: Pool, tmp_path: Any) -> None:
    for (actions, found), (_, expected) in both(pool, profile, "p2", str(tmp_path)):
        assert any("training_step" in action for action in actions)
        assert_weights(found, expected)
