"""Behaviours 2 to 6: stopping, checkpoints and resuming, on all ranks at the same step."""

import os
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_ptdp.checkpoint import CheckpointError
from tests.conformance.toys import (
    ONE,
    LitNet,
    Losses,
    Place,
    loader,
    make_trainer,
    weights,
)

pytestmark = pytest.mark.thorough

ALL = ["one", "d2", "p2"]


class Counter(L.Callback):
    """A callback with a state."""

    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, *_):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state_dict):
        self.batches = state_dict["batches"]


class LitScheduled(LitNet):
    """Uses a scheduler with a state."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def interrupted(rank, place, path):
    """Stop by max_steps within an epoch, and resume from the checkpoint in a new Trainer."""
    here = Path(path, place.folder)
    first = make_trainer(place, max_steps=6, max_epochs=None, callbacks=[Counter()])
    first.fit(LitScheduled(), loader())
    first.save_checkpoint(here / "middle.ckpt")
    losses, counter = Losses(), Counter()
    L.seed_everything(2, verbose=False)
    second = make_trainer(place, max_steps=11, max_epochs=None, callbacks=[losses, counter])
    second.fit(LitScheduled(), loader(), ckpt_path=here / "middle.ckpt")
    (schedule,) = (config.scheduler for config in second.lr_scheduler_configs)
    return {
        "weights": weights(second),
        "losses": losses.values,
        "where": (
            second.global_step,
            second.current_epoch,
            counter.batches,
            second.fit_loop.epoch_loop.batch_idx,
        ),
        "schedule": (schedule.last_epoch, schedule.get_last_lr()),
    }


@pytest.mark.parametrize("name", ALL)
def test_resume_within_epoch_restores_callback_and_scheduler(name, conformance, tmp_path):
    for found, expected in conformance.check(interrupted, name, str(tmp_path)):
        assert found["where"][0] == found["where"][2] == 11
        assert found["schedule"] == expected["schedule"]


def train_until_stopped(rank, place):
    stops = [
        EarlyStopping("val_loss", patience=2, min_delta=0.05),
        EarlyStopping("train_loss", stopping_threshold=1e-4, check_on_train_epoch_end=True),
        EarlyStopping("val_loss", mode="max", patience=50),
    ]
    trainer = make_trainer(place, callbacks=stops, max_epochs=40)
    trainer.fit(LitNet(), loader(), loader())
    return trainer.global_step, [
        (s.stopped_epoch, s.wait_count, float(s.best_score)) for s in stops
    ]


@pytest.mark.parametrize("name", ALL)
def test_early_stopping_callbacks_stop_all_ranks_together(name, conformance):
    for _, (_, states) in conformance.check(train_until_stopped, name):
        assert any(stopped for stopped, _, _ in states), "the reference was never stopped"


def stop_and_resume(rank, place, path):
    here = Path(path, place.folder)
    states = []
    for epochs, resume in ((3, None), (20, "last.ckpt")):
        L.seed_everything(1, verbose=False)
        # No epoch is good enough, so patience counts from the first epoch, across the resume.
        stop = EarlyStopping("val_loss", patience=5, min_delta=10.0)
        save = ModelCheckpoint(dirpath=here, save_last=True, save_top_k=0)
        trainer = make_trainer(
            place, callbacks=[stop, save], enable_checkpointing=True, max_epochs=epochs
        )
        trainer.fit(
            LitNet(), loader(), loader(), ckpt_path=None if resume is None else here / resume
        )
        states.append((stop.wait_count, stop.stopped_epoch, trainer.current_epoch))
    return states


@pytest.mark.parametrize("name", ALL)
def test_early_stopping_state_resumes(name, conformance, tmp_path):
    for found, _ in conformance.check(stop_and_resume, name, str(tmp_path)):
        assert [wait for wait, _, _ in found] == [2, 5]


class LitRenames(LitScheduled):
    """Changes the values in its own ``load_state_dict``."""

    def load_state_dict(self, state_dict, strict=True, assign=False):
        if os.environ.get("RENAMES"):
            state_dict = {name: value + 1 for name, value in state_dict.items()}
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def loads_by_itself(rank, place, path):
    here = Path(path, place.folder, "model.ckpt")
    first = make_trainer(place, max_steps=2)
    first.fit(LitRenames(), loader())
    first.save_checkpoint(here)
    second = make_trainer(place, max_steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RENAMES", "1")
        try:
            second.fit(LitRenames(), loader(), ckpt_path=here)
        except CheckpointError as error:
            return str(error)
    return weights(second)


@pytest.mark.parametrize("name", ["one", "d2"])
def test_overridden_load_state_dict_is_called(name, conformance, tmp_path):
    conformance.check(loads_by_itself, name, str(tmp_path))


def test_overridden_load_state_dict_is_refused_in_pipeline(conformance, tmp_path):
    place = Place(world_size=2, layout={"pipeline_parallel_size": 2})
    for found in conformance.ranks(loads_by_itself, place, str(tmp_path)):
        assert "LitRenames.load_state_dict is overridden" in found
        assert "on_load_checkpoint" in found


CHECKPOINTS = {
    "top_k": {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch}-{step}-{val_loss:.4f}"},
    "max": {"monitor": "val_loss", "mode": "max", "save_top_k": 1},
    "every_n": {"every_n_train_steps": 3, "save_top_k": -1, "save_last": True},
    "monitor_in_step": {
        "monitor": "train_loss",
        "every_n_train_steps": 2,
        "save_top_k": 3,
        "filename": "{train_loss:.3f}",
    },
    "interval": {"train_time_interval": timedelta(0), "save_top_k": -1},
    "last_link": {"save_last": "link", "every_n_epochs": 1, "save_top_k": 1},
    "weights": {"save_weights_only": True, "save_on_train_epoch_end": True, "every_n_epochs": 2},
}


def write_checkpoints(rank, place, path):
    here = Path(path, place.folder)
    savers = {
        name: ModelCheckpoint(dirpath=here / name, **options)
        for name, options in CHECKPOINTS.items()
    }
    trainer = make_trainer(
        place, callbacks=list(savers.values()), enable_checkpointing=True, max_epochs=4
    )
    trainer.fit(LitNet(), loader(), loader())
    trainer.strategy.barrier()
    files = sorted(str(p.relative_to(here)) for name in savers for p in (here / name).iterdir())
    best = {name: Path(s.best_model_path).name for name, s in savers.items()}
    scores = {
        name: float(s.best_model_score)
        for name, s in savers.items()
        if s.best_model_score is not None
    }
    return files, best, scores


@pytest.mark.parametrize("name", ALL)
def test_model_checkpoint_writes_same_files_as_lightning(name, conformance, tmp_path):
    for (files, best, scores), (
        expected_files,
        expected_best,
        expected_scores,
    ) in conformance.pairs(write_checkpoints, name, str(tmp_path)):
        assert len(expected_files) >= 20
        # our links, in addition to Lightning's files
        links = [name for name in files if name.endswith("/latest")]
        assert len(links) == (len(CHECKPOINTS) if files != expected_files else 0)
        assert [name for name in files if name not in links] == expected_files
        assert best == expected_best
        assert scores == pytest.approx(expected_scores, rel=1e-5)


class StopsInStep(LitNet):
    def training_step(self, batch, batch_idx):
        if self.global_step == 2:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


def stop_in_step(rank, place):
    trainer = make_trainer(place, max_epochs=3)
    trainer.fit(StopsInStep(), loader())
    return trainer.global_step, trainer.current_epoch


@pytest.mark.parametrize("more", [{}, {"virtual_pipeline_size": 2}])
def test_stop_in_step_of_last_stage_ends_all_stages(more, conformance):
    layout = {"pipeline_parallel_size": 2, "num_microbatches": 2, **more}
    (expected,) = conformance.expected(stop_in_step, ONE)
    assert conformance.ranks(stop_in_step, Place(world_size=2, layout=layout)) == [expected] * 2
