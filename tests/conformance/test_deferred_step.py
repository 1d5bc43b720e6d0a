"""Steps of an optimizer in the host's memory that run beside the next forward."""

import threading
from pathlib import Path
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
)

from lightning_ptdp.checkpoint import read_full
from lightning_ptdp.data_parallel import deferred_step, reads_between_steps
from lightning_ptdp.data_parallel.deferred_step import DeferredStep, can_defer
from lightning_ptdp.models import LitGPT
from lightning_ptdp.shims.lightning import lightning_names
from tests.conformance.toys import ONE, LitNet, Place, assert_weights, loader, make_trainer, weights
from tests.letters import M, P, Z

OPTIONS = {"offload_optimizer": True, "bucket_mb": 1e-3}
PLACES = {
    "one": (1, {}),
    "d2": (2, {}),
    "d2 ZeRO-1": (2, {Z: "optimizer"}),
    "d2 ZeRO-2 m2": (2, {Z: "gradients", M: 2}),
    "d2 ZeRO-3": (2, {Z: "parameters"}),
    "p2 m2": (2, {P: 2, M: 2}),
}


class Penalized(LitNet):
    """Reads parameters before its forward, and changes hyperparameters after every step."""

    def loss(self, batch):
        penalty = sum(p.square().sum() for p in self.parameters())
        return super().loss(batch) + 0.01 * penalty

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Skips(LitNet):
    """Skips a layer at random, and has one that no step uses."""

    def __init__(self):
        super().__init__()
        self.spare = torch.nn.Linear(2, 2)

    def loss(self, batch):
        x, y = batch
        for number, layer in enumerate(self.net):
            if number != 2 or (len(x) + int(1000 * float(x[0, 0]))) % 2:
                x = layer(x)
        return (x - y).square().mean()


def fit(rank, place, module, **options):
    steps = []

    def start(self, parts):
        steps.append(plain(self, parts))
        return steps[-1]

    plain = DeferredStep.start
    with mock.patch.object(DeferredStep, "start", start):
        trainer = make_trainer(place, gradient_clip_val=0.1, **options)
        trainer.fit(module(), loader())
        return sum(steps), weights(trainer)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        *((name, LitNet) for name in PLACES),
        *((name, Penalized) for name in PLACES if name != "p2 m2"),
        *((name, Skips) for name in ("d2", "d2 ZeRO-1", "d2 ZeRO-2 m2")),
    ],
)
def test_deferred_steps_give_same_weights(name, module, conformance):
    world_size, layout = PLACES[name]
    found, expected = (
        conformance.ranks(
            fit,
            Place(
                world_size=world_size,
                layout={**OPTIONS, **layout, "overlap_parameter_gather": overlaps},
            ),
            module,
        )
        for overlaps in (True, False)
    )
    for (steps, ours), (none, theirs) in zip(found, expected, strict=True):
        assert steps == 2 * 32 // 8 // (1 if P in layout else world_size)
        assert none == 0
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-7)


def fit_and_save(rank, place, path):
    folder = Path(path, str(place.layout["overlap_parameter_gather"]))
    saver = ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=False
    )
    return fit(rank, place, LitNet, callbacks=[saver])[0], folder


@pytest.mark.parametrize("layout", [{}, {Z: "optimizer"}, {Z: "parameters"}])
def test_checkpoint_between_steps_is_that_of_last_step(layout, conformance, tmp_path):
    states = []
    for overlaps in (True, False):
        options = {**OPTIONS, **layout, "overlap_parameter_gather": overlaps}
        place = Place(world_size=2, layout=options)
        steps, folder = conformance.ranks(fit_and_save, place, str(tmp_path))[0]
        assert steps == (4 if overlaps else 0)
        states.append([read_full(path) for path in sorted(folder.glob("*.ckpt"))])
    assert len(states[0]) == 4
    for ours, theirs in zip(*states, strict=True):
        assert_weights(ours, theirs)


class Marks(LitNet):
    """Counts the forwards after the first; each optimizer step waits for the next forward."""

    def __init__(self):
        super().__init__()
        self.begun = threading.Semaphore(0)
        self.waited = []

    def training_step(self, batch, batch_idx):
        if batch_idx > 0:
            self.begun.release()
        return super().training_step(batch, batch_idx)


class Clears(Marks):
    """Clears gradients in its step, where the last optimizer step still runs."""

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad(set_to_none=batch_idx % 2 == 0)
        return super().training_step(batch, batch_idx)


def fit_and_wait_in_step(rank, place, kind):
    module = kind()

    def step(groups):
        if len(module.waited) < 3:
            module.waited.append(module.begun.acquire(timeout=20))
        plain(groups)

    plain = deferred_step._step
    with (
        mock.patch.object(deferred_step, "_step", step),
        mock.patch.object(deferred_step, "_PART", 1 << 30),
    ):
        trainer = make_trainer(place, max_steps=4)
        trainer.fit(module, loader())
        return module.waited, weights(trainer)


def fit_four_steps(rank, place):
    trainer = make_trainer(place, max_steps=4)
    trainer.fit(LitNet(), loader())
    return weights(trainer)


@pytest.mark.parametrize("kind", [Marks, Clears])
def test_step_runs_beside_next_forward(kind, conformance):
    """Without the overlap no forward begins while a step waits for it."""
    ((waited, found),) = conformance.ranks(fit_and_wait_in_step, Place(layout=OPTIONS), kind)
    assert waited == [True] * 3
    assert_weights(found, conformance.expected(fit_four_steps, ONE)[0])


class Failing(torch.optim.SGD):
    __module__ = torch.optim.SGD.__module__

    def step(self, closure=None):
        result = super().step(closure)
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the step has failed")
        return result


class LitFailing(LitNet):
    def configure_optimizers(self):
        return Failing(self.parameters(), lr=0.1)


def fit_failing(rank, place):
    trainer = make_trainer(place)
    with pytest.raises(RuntimeError, match="the step has failed"):
        trainer.fit(LitFailing(), loader())


def test_error_of_deferred_step_ends_training(conformance):
    conformance.ranks(fit_failing, Place(layout=OPTIONS))


TORCHS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind not in (torch.optim.Optimizer, torch.optim.LBFGS)
]


@pytest.mark.parametrize("kind", TORCHS)
def test_own_step_changes_nothing_after_gradients_are_taken(kind):
    values = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = kind(values, lr=0.1)
    assert can_defer(optimizer)
    for value in values:
        value.grad = torch.ones(4, 4)
        if kind is torch.optim.SparseAdam:
            value.grad = value.grad.to_sparse()
    deferred = DeferredStep(optimizer)
    deferred.take(values)
    before = {value: dict(state) for value, state in optimizer.state.items()}
    optimizer.step(lambda: None)
    assert all(value.equal(torch.ones(4, 4)) for value in values)
    assert before == dict(optimizer.state)
    deferred.close()


def test_only_torchs_plain_optimizers_are_deferred():
    class Own(torch.optim.SGD):
        pass

    parameter = torch.nn.Parameter(torch.ones(2))
    hooked = torch.optim.SGD([parameter])
    hooked.register_step_post_hook(lambda *_: None)
    assert not can_defer(hooked)
    assert not can_defer(Own([parameter]))
    assert not can_defer(torch.optim.LBFGS([parameter]))


class Looks(Callback):
    def on_train_batch_end(self, *_):
        """May read parameters."""


class LooksItself(LitNet):
    def on_train_batch_end(self, *_):
        """May read parameters."""


class Clips(LitNet):
    def on_before_optimizer_step(self, optimizer):
        """Runs after the forward."""


@pytest.mark.parametrize(
    ("module", "callback", "reads"),
    [
        (LitNet, LearningRateMonitor(), False),
        (LitNet, Looks(), True),
        (LitNet, LambdaCallback(on_train_batch_end=print), True),
        (LitNet, EMAWeightAveraging(), True),
        (LooksItself, LearningRateMonitor(), True),
        (Clips, LearningRateMonitor(), False),
        (LitGPT, LearningRateMonitor(), False),
    ],
)
def test_hooks_and_callbacks_may_read_parameters(module, callback, reads):
    trainer = make_trainer(Place(), callbacks=[callback])
    trainer.strategy.connect(module.__new__(module))
    assert isinstance(trainer, L.Trainer)
    assert reads_between_steps(trainer, lightning_names("lightning.pytorch")) is reads
