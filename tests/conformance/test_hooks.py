"""Behaviour 1: every hook of callbacks and modules fires in Lightning's order."""

import inspect
from itertools import groupby
from pathlib import Path

import lightning.pytorch as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from tests.conformance.toys import LitNet, loader, make_trainer

pytestmark = pytest.mark.thorough

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def _recording(base, names, who):
    """Return a subclass of ``base`` that records calls of ``names`` in ``self.events``."""

    def method(name):
        original = getattr(base, name)

        def call(self, *args, **kwargs):
            self.events.append(f"{who}.{name}")
            return original(self, *args, **kwargs)

        call.__signature__ = inspect.signature(original)
        return call

    return type(f"Recording{base.__name__}", (base,), {name: method(name) for name in names})


def _public(*classes):
    return sorted(
        {
            name
            for c in classes
            for name, f in vars(c).items()
            if inspect.isfunction(f) and not name.startswith("_")
        }
    )


CALLBACK_HOOKS = [n for n in _public(L.Callback) if n not in ("state_dict", "load_state_dict")]
NOT_CALLED = (
    "prepare_data",
    "configure_sharded_model",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
)
MODULE_HOOKS = [
    *(name for name in _public(ModelHooks, DataHooks, CheckpointHooks) if name not in NOT_CALLED),
    *STEPS,
    *(
        "configure_optimizers",
        "configure_gradient_clipping",
        "lr_scheduler_step",
        "optimizer_step",
        "optimizer_zero_grad",
    ),
]


def record(rank, place, path):
    """Return the hooks called by fit, validate, test and predict."""
    events = []
    module = _recording(LitNet, MODULE_HOOKS, "module")()
    callback = _recording(L.Callback, CALLBACK_HOOKS, "callback")()
    module.__dict__["events"] = callback.events = events
    checkpoint = ModelCheckpoint(dirpath=Path(path, place.folder), every_n_train_steps=2)
    trainer = make_trainer(
        place,
        callbacks=[callback, checkpoint],
        enable_checkpointing=True,
        gradient_clip_val=0.1,
        accumulate_grad_batches=2,
    )
    seen = {}
    for name, run in (
        ("fit", lambda: trainer.fit(module, loader(), loader())),
        ("validate", lambda: trainer.validate(module, loader(), verbose=False)),
        ("test", lambda: trainer.test(module, loader(), verbose=False)),
        ("predict", lambda: trainer.predict(module, loader())),
    ):
        run()
        seen[name] = list(events)
        events.clear()
    return seen


@pytest.mark.parametrize("name", ["one", "d2", "p2"])
def test_hooks_fire_in_lightnings_order(name, conformance, tmp_path):
    for found, expected in conformance.pairs(record, name, str(tmp_path)):
        for stage, events in expected.items():
            assert len(events) > 20, "the reference recorded nothing"
            # The step itself runs once per microbatch.
            assert _once(found[stage]) == events, stage


def record_resumed(rank, place, path):
    """Return the hooks called by a fit and a validation that load a checkpoint."""
    events = []
    file = Path(path, place.folder, "first.ckpt")
    first = make_trainer(place, max_epochs=1)
    first.fit(LitNet(), loader())
    first.save_checkpoint(file)
    seen = {}
    for name in ("fit", "validate"):
        module = _recording(LitNet, MODULE_HOOKS, "module")()
        callback = _recording(
            L.Callback, [*CALLBACK_HOOKS, "state_dict", "load_state_dict"], "callback"
        )()
        module.__dict__["events"] = callback.events = events
        trainer = make_trainer(place, callbacks=[callback])
        if name == "fit":
            trainer.fit(module, loader(), loader(), ckpt_path=file)
        else:
            trainer.validate(module, loader(), ckpt_path=file, verbose=False)
        seen[name] = list(events)
        events.clear()
    return seen


@pytest.mark.parametrize("name", ["one", "d2"])
def test_hooks_of_resumed_run_fire_in_lightnings_order(name, conformance, tmp_path):
    for found, expected in conformance.pairs(record_resumed, name, str(tmp_path)):
        for stage, events in expected.items():
            assert "callback.on_load_checkpoint" in events, "the reference recorded nothing"
            assert _once(found[stage]) == events, stage


def _once(events):
    """Merge consecutive calls of the same step."""
    return [
        e
        for name, run in groupby(events)
        for e in ([name] if name.split(".")[1] in STEPS else list(run))
    ]
