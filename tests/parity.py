"""Parity of a training in a layout with the same training in a single process.

A ``Training`` is plain data that creates its module, batches and Trainer. ``fit`` runs it on one
rank and returns plain data. ``assert_same`` compares two results. The fixture ``parity`` does all
of this for a training and a place. It runs each single-process training once per session.
"""

import pickle
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from unittest.mock import patch

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_ptdp.pipeline.dry_run import Rehearsal
from lightning_ptdp.strategy import PTDPStrategy, ptdp
from tests.pool import Pool

Place = tuple[int, dict[str, Any]]
"""Number of processes and strategy options."""
Result = dict[str, Any]


def make_trainer(strategy: Any, world_size: int = 1, **options: Any) -> L.Trainer:
    """Return a Trainer that writes nothing, for CPU processes unless ``options`` differ."""
    callbacks = options.get("callbacks", ())
    usual = {
        "accelerator": "cpu",
        "devices": world_size,
        "logger": False,
        "enable_checkpointing": any(isinstance(one, Checkpoint) for one in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(strategy=strategy, **(usual | options))


def make_loader(data: Any, trainer: L.Trainer, global_batch: int) -> DataLoader:
    """Return a loader of this replica's part of each global batch, in data order.

    Lightning's own sampler would shuffle the training data.
    """
    sampler: DistributedSampler = DistributedSampler(
        data, **trainer.strategy.distributed_sampler_kwargs, shuffle=False
    )
    return DataLoader(data, batch_size=global_batch // sampler.num_replicas, sampler=sampler)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a training.

    Attributes:
        steps: Number of batches.
        global_batch: Samples per batch over all replicas.
        validate_every: Batches between validations; 0 validates after the last batch.
    """

    layout: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    steps: int = 4
    global_batch: int = 8
    accumulate: int = 1
    clip: float | None = None
    precision: Any = "32-true"
    validate_every: int | None = None
    save: str | None = None
    resume: str | None = None

    tolerance: ClassVar[float] = 1e-5
    weight_tolerance: ClassVar[float | None] = None
    """Tolerance of weights if it differs: losses and norms may be rounded to float32."""
    smallest: ClassVar[float] = 0.0
    """Norm below which the difference of a weight is compared absolutely."""
    synced: ClassVar[tuple[str, ...]] = ()
    """Metrics that are synchronized over all replicas."""
    always_clips: ClassVar[bool] = True
    """True if every gradient norm exceeds the clipping threshold."""
    trainer_options: ClassVar[dict[str, Any]] = {"num_sanity_val_steps": 0}
    """Further options of the Trainer."""

    def on(self, place: Place) -> Any:
        """Return the same training with the processes and options of ``place``."""
        world_size, layout = place
        return replace(self, world_size=world_size, layout=self.layout | layout)

    def make_module(self) -> L.LightningModule:
        raise NotImplementedError

    def make_data(self) -> Dataset:
        raise NotImplementedError

    def make_strategy(self) -> PTDPStrategy:
        return PTDPStrategy(**self.layout)

    def make_callbacks(self) -> list[L.Callback]:
        return []

    def make_trainer(self, *callbacks: L.Callback) -> L.Trainer:
        validates = self.validate_every is not None
        return make_trainer(
            self.make_strategy(),
            self.world_size,
            max_steps=self.steps // self.accumulate,
            accumulate_grad_batches=self.accumulate,
            gradient_clip_val=self.clip,
            precision=self.precision,
            val_check_interval=(self.validate_every or self.steps) if validates else None,
            check_val_every_n_epoch=None if validates else 1,
            callbacks=[*callbacks, *self.make_callbacks()],
            **self.trainer_options,
        )

    def make_loaders(self, trainer: L.Trainer) -> list[DataLoader]:
        """Return the training loader and, if the training validates, the validation loader."""
        loader = make_loader(self.make_data(), trainer, self.global_batch)
        return [loader] if self.validate_every is None else [loader, loader]

    def results(self, trainer: Any, module: Any) -> Result:
        """Return additional results after the training."""
        return {}


class Recorder(L.Callback):
    """Callback that records losses, gradient norms, metrics and the initial weights."""

    def __init__(self):
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.logged: list[dict[str, float]] = []
        self.initial: dict[str, Tensor] = {}

    def on_train_start(self, trainer, module):
        self.initial = trainer.strategy.gather_state_dict()

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.losses.append(self._over_replicas(trainer, outputs))
        self.logged.append(metrics(trainer))
        if trainer.strategy.gradient_norm is not None:
            self.norms.append(float(trainer.strategy.gradient_norm))

    def _over_replicas(self, trainer: Any, outputs: Any) -> float:
        """Return the mean loss over the counted tokens of all replicas.

        Without a schedule, Lightning reports the loss of this replica only.
        """
        group = trainer.strategy.mesh.group("replica_sum")
        weight = float(outputs.get("num_tokens", 1.0))
        sums = torch.tensor([float(outputs["loss"]) * weight, weight], dtype=torch.float64)
        if group.size > 1:
            torch.distributed.all_reduce(sums, group=group.handle)
        return float(sums[0] / sums[1])


def metrics(trainer: L.Trainer) -> dict[str, float]:
    """Return the Trainer's callback metrics as floats."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def fit(rank: int, training: Training) -> Result:
    """Train and return losses, norms, metrics and the full weights before and after."""
    L.seed_everything(3, verbose=False)
    recorder, module = Recorder(), training.make_module()
    trainer = training.make_trainer(recorder)
    with checks_of_rank_0(rank), rehearsed_once(training):
        trainer.fit(module, *training.make_loaders(trainer), ckpt_path=training.resume)
    if training.save is not None:
        trainer.save_checkpoint(training.save)
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "logged": [*recorder.logged, metrics(trainer)],
        "replicas": trainer.strategy.layout.num_replicas,
        "initial": recorder.initial,
        "final": trainer.strategy.gather_state_dict(),
        **training.results(trainer, module),
    }


@contextmanager
def checks_of_rank_0(rank: int) -> Iterator[None]:
    """Check the model on rank 0 only, and share its result.

    It is the same on every rank, and takes a third of a short training.
    """
    if not dist.is_initialized() or dist.get_backend() != "gloo":
        with patch.object(Rehearsal, "on_examples") if rank else nullcontext():
            yield
        return
    check = ptdp.check_model

    def shared(*args: Any, **kwargs: Any) -> Any:
        found: list[Any] = [None]
        if rank == 0:
            try:
                known = check(*args, **kwargs)
                with suppress(
                    pickle.PicklingError, AttributeError, TypeError
                ):  # such as of a lambda
                    found = [pickle.dumps(known)]
            finally:
                dist.broadcast_object_list(found)
            return known
        dist.broadcast_object_list(found)
        return check(*args, **kwargs) if found[0] is None else pickle.loads(found[0])

    with patch.object(ptdp, "check_model", shared):
        yield


_rehearsed: set[str] = set()
"""Successful rehearsals of this process."""


@contextmanager
def rehearsed_once(training: Training) -> Iterator[None]:
    """Rehearse each model and cut once: all other options leave the stages as they are."""
    rehearse = Rehearsal.on_examples
    uncut = replace(training, layout={}, world_size=1)

    def once(self: Rehearsal) -> None:
        key = f"{uncut} {self.model} {self.parts} {self.ranges} {self.collects}"
        if key not in _rehearsed:
            rehearse(self)
            _rehearsed.add(key)

    with patch.object(Rehearsal, "on_examples", once):
        yield


def distance(found: Any, expected: Any, start: Any = None) -> float:
    """Return the relative distance between two models.

    Single elements with almost no gradient may move in either direction. With ``start``, the
    distance is relative to the total change during training.
    """
    left, right, origin = (
        torch.cat([state[name].double().flatten() for name in expected])
        for state in (found, expected, start or expected)
    )
    length = right if start is None else right - origin
    return float((left - right).norm() / length.norm())


def assert_near(
    found: Any, expected: Any, tolerance: float, what: str, *, absolute: float = 0.0
) -> None:
    """Assert that numbers are equal within a relative and an absolute tolerance."""
    got, wanted = (torch.tensor(numbers, dtype=torch.float64) for numbers in (found, expected))
    torch.testing.assert_close(
        got, wanted, rtol=tolerance, atol=absolute, msg=lambda text: f"{what}: {text}"
    )


def assert_weights_near(
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    *,
    tolerance: float = Training.tolerance,
    smallest: float = 0.0,
) -> None:
    """Assert that parameters and buffers are close, each by the norm of its difference."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        got = found[name]
        assert (got.shape, got.dtype) == (value.shape, value.dtype), name
        difference = (got.double() - value.double()).norm()
        length = value.double().norm().clamp(min=smallest)
        assert difference <= tolerance * length, (
            f"{name} has a relative error of {difference / length:.1e}"
        )


def assert_same(
    found: Result,
    expected: Result,
    *,
    tolerance: float = Training.tolerance,
    weight_tolerance: float | None = None,
    smallest: float = 0.0,
    synced: Collection[str] = (),
    but: Collection[str] = (),
) -> None:
    """Assert that initial weights are bitwise equal and all else is within the tolerance.

    A replica logs values of its own samples, except for the ``synced`` metrics.
    """
    assert found["initial"].keys() == expected["initial"].keys()
    for name, value in expected["initial"].items():
        assert torch.equal(found["initial"][name], value), f"the initial values of {name} differ"
    for key in ("losses", "norms"):
        assert_near(found[key], expected[key], tolerance, key)
    for step, (mine, theirs) in enumerate(zip(found["logged"], expected["logged"], strict=True)):
        for name in (mine.keys() | theirs.keys()) - set(but):
            if found["replicas"] == 1 or name in synced:
                assert_near(mine[name], theirs[name], tolerance, f"{name} of batch {step}")
    assert_weights_near(
        found["final"],
        expected["final"],
        tolerance=tolerance if weight_tolerance is None else weight_tolerance,
        smallest=smallest,
    )


class Parity:
    """Trainings in layouts, compared with a single process."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._results: dict[str, Result] = {}

    def result(self, training: Training) -> Result:
        """Return the result of rank 0; each training runs once per session."""
        key = repr(training)
        if key not in self._results:
            self._results[key] = self.ranks(training)[0]
        return self._results[key]

    def ranks(self, training: Training, fit: Callable[..., Result] = fit) -> list[Result]:
        """Return the results of all ranks."""
        return self.pool.run(fit, world_size=training.world_size, args=(training,))

    def check(
        self,
        training: Training,
        place: Place,
        *,
        expected: Result | None = None,
        tolerance: float | None = None,
        but: Collection[str] = (),
        fit: Callable[..., Result] = fit,
    ) -> list[Result]:
        """Compare every rank with a single process or ``expected``; return all results.

        The options of ``place`` extend those of the single-process training.
        """
        expected = expected or self.result(replace(training, save=None))
        if training.always_clips and training.clip is not None:
            assert min(expected["norms"]) > training.clip, "the clipping threshold has no effect"
        ranks = self.ranks(training.on(place), fit)
        for found in ranks:
            assert_same(
                found,
                expected,
                tolerance=training.tolerance if tolerance is None else tolerance,
                weight_tolerance=training.weight_tolerance,
                smallest=training.smallest,
                synced=training.synced,
                but=but,
            )
        assert len({tuple(found["losses"]) for found in ranks}) == 1, "losses differ between ranks"
        return ranks
