"""Resume of callback state that is needed before fit, of extra state, and from URLs."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Timer
from torch import nn

from lightning_ptdp.callbacks import InitFrom
from lightning_ptdp.checkpoint import CheckpointError
from tests.conformance.toys import (
    PLACES,
    LitBackbone,
    LitNet,
    Losses,
    Place,
    assert_weights,
    loader,
    make_trainer,
    weights,
)

pytestmark = pytest.mark.thorough


class Groups(L.Callback):
    """Records the learning rates and sizes of the parameter groups per step."""

    def __init__(self):
        self.seen: list[list[tuple[float, int]]] = []

    def on_train_batch_end(self, trainer, *_):
        groups = trainer.optimizers[0].param_groups
        self.seen.append(
            [(group["lr"], sum(p.numel() for p in group["params"])) for group in groups]
        )


def unfreeze(rank: int, place: Place, path: str, stop: int) -> Any:
    file = Path(path, place.folder, f"{stop}.ckpt")
    L.seed_everything(1, verbose=False)
    first = make_trainer(
        place, max_epochs=stop, callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=2)]
    )
    first.fit(LitBackbone(), loader())
    first.save_checkpoint(file)
    groups, losses = Groups(), Losses()
    again = [BackboneFinetuning(unfreeze_backbone_at_epoch=2), groups, losses]
    second = make_trainer(place, max_epochs=4, callbacks=again)
    second.fit(LitBackbone(), loader(), ckpt_path=file)
    return groups.seen, losses.values, weights(second)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_backbone_is_unfrozen_at_its_epoch_after_resume(stop, conformance, tmp_path):
    for (groups, losses, found), (other_groups, other_losses, expected) in conformance.pairs(
        unfreeze, "one", str(tmp_path), stop
    ):
        assert len(other_groups[-1]) == 2, "the reference unfroze nothing"
        assert [[size for _, size in step] for step in groups] == [
            [size for _, size in step] for step in other_groups
        ]
        for step, other in zip(groups, other_groups, strict=True):
            assert [rate for rate, _ in step] == pytest.approx([rate for rate, _ in other])
        assert losses == pytest.approx(other_losses, rel=1e-5)
        assert_weights(found, expected)


class BatchTimer(Timer):
    """A timer that counts one minute per batch."""

    def __init__(self, minutes: int) -> None:
        super().__init__(duration=timedelta(minutes=minutes))
        self.batches = 0

    def time_elapsed(self, stage: Any = "train") -> float:
        return self._offset + 60.0 * self.batches

    def on_train_batch_end(self, *args, **kwargs):
        self.batches += 1
        super().on_train_batch_end(*args, **kwargs)


def out_of_time(rank: int, place: Place, path: str, minutes: int) -> Any:
    file = Path(path, place.folder, "timed.ckpt")
    L.seed_everything(1, verbose=False)
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
    for found, expected in conformance.pairs(out_of_time, name, str(tmp_path), minutes):
        assert found == expected
        assert found[0] >= 2


def urls_and_nothing(rank: int, place: Place, path: str) -> Any:
    here = Path(path, place.folder)
    L.seed_everything(1, verbose=False)
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
    for (step, val_loss), (expected_step, expected_loss) in conformance.pairs(
        urls_and_nothing, name, str(tmp_path)
    ):
        assert step == expected_step
        assert val_loss == pytest.approx(expected_loss, rel=1e-5)
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


def count(rank: int, place: Place, path: str, first: bool = False) -> Any:
    """Return the counts after one epoch and after a second run: two resumed epochs or, with
    ``first``, one epoch from the saved weights."""
    file = Path(path, place.folder, "counted.ckpt")
    L.seed_everything(1, verbose=False)
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
