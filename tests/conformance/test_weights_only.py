"""Weights-only checkpoints, and checkpoints that a callback loads in a resumed run."""

from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ptdp.callbacks import InitFrom
from lightning_ptdp.checkpoint import CheckpointError
from tests.conformance.toys import (
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

PLACES = {"one": Place(), "d2": Place(world_size=2), "p2": Place(world_size=2, layout=P2)}


def begin_from_weights(rank, place, path):
    saver = ModelCheckpoint(dirpath=path, filename="weights", save_weights_only=True)
    first = make_trainer(place, max_epochs=1, callbacks=[saver], enable_checkpointing=True)
    first.fit(LitNet(), loader())
    first.save_checkpoint(Path(path, "by hand.ckpt"), weights_only=True)
    L.seed_everything(2, verbose=False)
    begun = make_trainer(
        place, limit_train_batches=0, max_epochs=1, callbacks=[InitFrom(saver.best_model_path)]
    )
    begun.fit(LitNet(), loader())
    with pytest.raises(CheckpointError, match=r"has weights but no training state.*InitFrom"):
        make_trainer(place).fit(LitNet(), loader(), ckpt_path=saver.best_model_path)
    return weights(first), weights(begun), saver.best_model_path


@pytest.mark.parametrize("name", PLACES)
def test_weights_only_checkpoint_initializes_training(name, conformance, tmp_path):
    place = PLACES[name]
    found = conformance.ranks(begin_from_weights, place, str(tmp_path))
    for trained, begun, _ in found:
        assert_weights(begun, trained, tolerance=0)
    for file in (found[0][2], tmp_path / "by hand.ckpt"):
        assert_weights(LitNet.load_from_checkpoint(file).state_dict(), trained, tolerance=0)


class Teacher(L.Callback):
    """Reads another checkpoint through the strategy at fit start and before each batch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read = []

    def on_fit_start(self, trainer, module):
        self.read.append(self._mean(trainer))

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.read.append(self._mean(trainer))

    def _mean(self, trainer):
        state = trainer.strategy.load_checkpoint(self.path)["state_dict"]
        return float(torch.cat([state[name].flatten() for name in sorted(state)]).mean())


def resume_beside(rank, place, path):
    here = Path(path, place.folder)
    for name, seed, epochs in (("teacher", 3, 2), ("student", 4, 1)):
        L.seed_everything(seed, verbose=False)
        trainer = make_trainer(place, max_epochs=epochs)
        trainer.fit(LitNet(), loader())
        trainer.save_checkpoint(here / f"{name}.ckpt")
    teacher, losses = Teacher(here / "teacher.ckpt"), Losses()
    trainer = make_trainer(place, max_epochs=2, callbacks=[teacher, losses])
    trainer.fit(LitNet(), loader(), ckpt_path=here / "student.ckpt")
    return teacher.read, losses.values, weights(trainer)


@pytest.mark.parametrize("name", ["one", "p2"])
def test_checkpoint_loaded_by_callback_does_not_affect_resume(name, conformance, tmp_path):
    for (read, losses, found), (other_read, other_losses, expected) in conformance.pairs(
        resume_beside, name, str(tmp_path)
    ):
        assert read == pytest.approx(other_read, rel=1e-4)
        assert losses == pytest.approx(other_losses, rel=1e-5)
        assert_weights(found, expected)


class Undecided(InitFrom):
    """Records the weights before the first batch."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if not hasattr(self, "begun"):
            self.begun = trainer.strategy.gather_state_dict()


def resume_with_init(rank, place, path):
    for name, seed in (("start", 3), ("reached", 4)):
        L.seed_everything(seed, verbose=False)
        trainer = make_trainer(place, max_epochs=1)
        trainer.fit(LitNet(), loader())
        trainer.save_checkpoint(Path(path, f"{name}.ckpt"))
    init = Undecided(Path(path, "start.ckpt"))
    make_trainer(place, max_epochs=2, callbacks=[init]).fit(
        LitNet(), loader(), ckpt_path=Path(path, "reached.ckpt")
    )
    return init.begun, weights(trainer)


@pytest.mark.parametrize("name", PLACES)
def test_resumed_checkpoint_overrides_init_from(name, conformance, tmp_path):
    place = PLACES[name]
    for begun, reached in conformance.ranks(resume_with_init, place, str(tmp_path)):
        assert_weights(begun, reached, tolerance=0)
