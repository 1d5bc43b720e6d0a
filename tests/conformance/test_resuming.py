"""Resume of callback state that is needed before fit, of extra state, and from URLs."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Timer
from torch import nn

from lightning_ptdp.callbacks import InitFrom
from lightning_ptdp.checkpoint import CheckpointError
from tests.conformance.toys import (
    PLACES,
    LitNet,
    Losses,
    loader,
    make_trainer,
)

pytestmark = pytest.mark.thorough


class BatchTimer(Timer):
    """A timer that counts one minute per batch."""

    def __init__(self, minutes: int) -> None:
        super().__init__(duration=timedelta(minutes=minutes))
        self.batches = 0

    def time_elapsed(self, stage="train"):
        return self._offset + 60.0 * self.batches

    def on_train_batch_end(self, *args, **kwargs):
        self.batches += 1
        super().on_train_batch_end(*args, **kwargs)


def out_of_time(rank, place, path, minutes):
    file = Path(path, place.folder, "timed.ckpt")
    first = make_trainer(place, max_epochs=9, callbacks=[BatchTimer(3)])
    first.fit(LitNet(), loader())
    first.save_checkpoint(file)
    losses = Losses()
    second = make_trainer(place, max_epochs=9, callbacks=[BatchTimer(minutes), losses])
    second.fit(LitNet(), loader(), ckpt_path=file)
    return first.global_step, second.global_step, len(losses.values)


@pytest.mark.parametrize("minutes", [3, 5])
@pytest.mark.parametrize("name", ["one", "d2"])
def test_timer_stops_resumed_run_at_same_batch(name, minutes, conformance, tmp_path):
    for found, _ in conformance.check(out_of_time, name, str(tmp_path), minutes):
        assert found[0] >= 2


def urls_and_nothing(rank, place, path):
    here = Path(path, place.folder)
    first = make_trainer(place, max_epochs=1)
    first.fit(LitNet(), loader())
    first.save_checkpoint(
        (here / "named by a url.ckpt").as_posix()
        if place.folder == "reference"
        else f"file://{here}/named by a url.ckpt"
    )
    second = make_trainer(place, max_epochs=2)
    second.fit(LitNet(), loader(), ckpt_path=f"file://{here}/named by a url.ckpt")
    results = second.validate(
        LitNet(), loader(), ckpt_path=f"file://{here}/named by a url.ckpt", verbose=False
    )
    with pytest.raises(FileNotFoundError, match=r"missing\.ckpt"):
        second.fit(LitNet(), loader(), ckpt_path=here / "missing.ckpt")
    if place.folder == "ours":
        why = (
            "fsspec does not support URLs with the protocol nowhere"
            if place.layout
            else "ValueError: Protocol not known: nowhere"
        )
        with pytest.raises(CheckpointError, match=rf"nowhere://bucket/one\.ckpt failed: .*{why}"):
            first.save_checkpoint("nowhere://bucket/one.ckpt")
    return second.global_step, results[0]["val_loss"]


@pytest.mark.parametrize("name", ["one", "p2"])
def test_file_urls_and_missing_checkpoints(name, conformance, tmp_path):
    conformance.check(urls_and_nothing, name, str(tmp_path))
    written = tmp_path / "ours" / "named by a url.ckpt"
    assert written.is_file() if name == "one" else (written / "metadata.json").is_file()


class Counting(nn.Linear):
    """Counts its training forwards in its extra state, a tensor."""

    count = 0

    def forward(self, input):
        self.count += self.training
        return super().forward(input)

    def get_extra_state(self):
        return torch.tensor(self.count)

    def set_extra_state(self, state):
        self.count = int(state)


class LitCounting(LitNet):
    def __init__(self):
        super().__init__()
        self.net[2] = Counting(16, 16)


def count(rank, place, path, first=False):
    """Return the counts after one epoch and after a second run: two resumed epochs or, with
    ``first``, one epoch from the saved weights."""
    file = Path(path, place.folder, "counted.ckpt")
    counts = []
    for epochs, resume in ((1, None), (1, None) if first else (3, file)):
        callbacks = [InitFrom(file)] if first and counts else []
        trainer, module = make_trainer(place, max_epochs=epochs, callbacks=callbacks), LitCounting()
        trainer.fit(module, loader(), ckpt_path=resume)
        trainer.save_checkpoint(file)
        counts += [part.count for part in module.modules() if isinstance(part, Counting)] or [0]
    return counts


@pytest.mark.parametrize("name", ["one", "d2", "p2"])
def test_extra_state_resumes_from_checkpoint(name, conformance, tmp_path):
    # a stage counts microbatches
    counted = [found for found, _ in conformance.pairs(count, name, str(tmp_path)) if any(found)]
    assert counted
    for before, after in counted:
        assert after == 3 * before > 0


@pytest.mark.parametrize("name", ["one", "p2"])
def test_extra_state_is_initialized_from_weights(name, conformance, tmp_path):
    place, _ = PLACES[name]
    for before, after in conformance.ranks(count, place, str(tmp_path), True):
        assert after == 2 * before
