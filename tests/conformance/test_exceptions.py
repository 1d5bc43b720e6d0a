"""Behaviour 23: a user's exception is the error that is shown, callbacks that save on it do not
hang, and collectives that only one stage would enter are refused."""

import contextlib
import gc
import os
import signal
import warnings
import weakref
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.distributed.nn.functional import all_gather as gather_with_gradients

from lightning_ptdp.strategy import stopping
from tests.conformance.toys import (
    DDP,
    P2,
    LitNet,
    Place,
    assert_weights,
    loader,
    make_trainer,
    weights,
)

pytestmark = pytest.mark.thorough

D2, P2D2 = Place(world_size=2), Place(world_size=4, layout=P2)
PLACES = {"p2": Place(world_size=2, layout=P2), "d2": D2, "p2d2": P2D2}
SHARDED = Place(world_size=2, layout={"shard": "optimizer"})


class Mistake(L.Callback):
    """Raises before the third batch on some ranks."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 2 and trainer.global_rank in self._ranks:
            raise ZeroDivisionError("the user's own mistake")


def interrupted(rank, place, ranks, path):
    """Return this rank's error and its warnings about skipped saves."""
    stopping._PATIENCE_S = 1.0
    savers = [
        OnExceptionCheckpoint(path),
        ModelCheckpoint(path, filename="model", save_on_exception=True, every_n_epochs=9),
    ]
    trainer = make_trainer(place, callbacks=[Mistake(ranks), *savers], enable_checkpointing=True)
    with (
        warnings.catch_warnings(record=True, action="always") as caught,
        pytest.raises((ZeroDivisionError, RuntimeError)) as info,
    ):
        trainer.fit(LitNet(), loader())
    if rank in ranks and len(ranks) < place.world_size:
        dist.destroy_process_group()  # as at the end of the process
    said = [str(warning.message) for warning in caught if "is not saved" in str(warning.message)]
    return f"{info.typename}: {info.value}", said


@pytest.mark.parametrize(("place", "rank"), [(PLACES["p2"], 0), (PLACES["p2"], 1), (SHARDED, 1)])
def test_save_on_exception_of_one_rank_is_skipped_with_warning(place, rank, conformance, tmp_path):
    outcomes = conformance.ranks(interrupted, place, (rank,), str(tmp_path))
    error, said = outcomes[rank]
    assert error == "ZeroDivisionError: the user's own mistake"
    assert (
        "on_exception.ckpt is not saved: the exception did not end all ranks at the same step"
        in said[0]
    )
    error, _ = outcomes[1 - rank]
    cause = (
        f"The cause is on rank {rank}: ZeroDivisionError: the user's own mistake "
        "(test_exceptions.py, line "
    )
    assert error.startswith(f"PeerError: {cause}"), "the error does not start with the cause"
    assert not list(tmp_path.iterdir())


def test_replica_saves_on_exception_of_other_rank(conformance, tmp_path):
    outcomes = conformance.ranks(interrupted, PLACES["d2"], (1,), str(tmp_path))
    assert outcomes[0][0].startswith("PeerError: The cause is on rank 1") and not outcomes[0][1]
    assert torch.load(tmp_path / "on_exception.ckpt")["global_step"] > 0


def interrupted_and_resumed(rank, place, path):
    here = str(Path(path, place.folder))
    outcome = interrupted(rank, place, tuple(range(place.world_size)), here)
    L.seed_everything(2, verbose=False)
    trainer = make_trainer(place)
    trainer.fit(LitNet(), loader(), ckpt_path=f"{here}/on_exception.ckpt")
    return outcome, sorted(os.listdir(here)), weights(trainer)


@pytest.mark.parametrize("name", ["p2", "d2"])
def test_checkpoint_of_exception_on_all_ranks_resumes(name, conformance, tmp_path):
    for (outcome, files, found), (_, expected_files, expected) in conformance.pairs(
        interrupted_and_resumed, name, str(tmp_path)
    ):
        assert outcome == ("ZeroDivisionError: the user's own mistake", [])
        assert set(expected_files) == {"on_exception.ckpt", "model.ckpt"}
        assert set(files) - {"latest"} == set(expected_files), (
            "files other than the link 'latest' differ"
        )
        assert_weights(found, expected)


class FailsOnOne(LitNet):
    """Raises inside the step, on the last stage."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise ZeroDivisionError("the user's own mistake")
        return loss


def forked(rank, path):
    place = Place(world_size=2, layout={**P2, "start_method": "fork"})
    trainer = make_trainer(
        place, callbacks=[OnExceptionCheckpoint(path)], enable_checkpointing=True
    )
    with (
        pytest.raises(Exception, match="the user's own mistake") as info,
        pytest.warns(UserWarning, match="does not have their trained state"),
    ):
        trainer.fit(FailsOnOne(), loader())
    return str(info.value)


def test_forking_process_shows_exception_and_saves_nothing(fresh, tmp_path):
    (error,) = fresh.run(forked, world_size=1, args=(str(tmp_path),), limit=60.0)
    *_, said, where = error.rstrip().splitlines()
    assert said == "ZeroDivisionError: the user's own mistake", error
    assert "microbatch" in where
    assert "in training_step" in error
    assert not list(tmp_path.iterdir())


def freed(rank, place, mistaken):
    """Return True if the strategy is freed after a run, including its process groups."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # remove the handler of an earlier run
    trainer = make_trainer(place, callbacks=[Mistake(mistaken)])
    strategy = weakref.ref(trainer.strategy)
    with contextlib.suppress(ZeroDivisionError):
        trainer.fit(LitNet(), loader())
    del trainer
    gc.collect()
    return strategy() is None


@pytest.mark.parametrize("mistaken", [(), (0, 1)], ids=["ended", "failed"])
@pytest.mark.parametrize("name", ["d2", "p2"])
def test_strategy_is_freed_after_run(name, mistaken, conformance):
    assert conformance.ranks(freed, PLACES[name], mistaken) == [True, True]


class Communicates(LitNet):
    """Calls a collective in a step."""

    def __init__(self, hook: str, name: str) -> None:
        super().__init__()
        self.hook, self.name = hook, name

    def communicate(self, hook, value):
        if hook != self.hook:
            return
        match self.name:
            case "all_gather":
                self.all_gather(value)
            case "barrier":
                self.trainer.strategy.barrier()
            case "broadcast":
                self.trainer.strategy.broadcast(value)
            case "reduce":
                self.trainer.strategy.reduce(value)
            case "torch.distributed.all_reduce":
                dist.all_reduce(value)
            case "torch.distributed.all_gather":
                gather_with_gradients(value)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.communicate("training_step", loss.detach())
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)
        self.communicate("validation_step", batch[0].mean())


def communicates(rank, place, hook, name):
    trainer, outcome = make_trainer(place, num_sanity_val_steps=0), ""
    try:
        trainer.fit(Communicates(hook, name), loader(), loader())
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    if outcome and dist.is_initialized() and rank == place.world_size - 1:
        # gloo closes a group's connections when it is freed, like the end of a process does
        dist.destroy_process_group()
        del trainer
        gc.collect()
    return outcome


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        ("training_step", "all_gather"),
        ("training_step", "barrier"),
        ("validation_step", "broadcast"),
        ("validation_step", "reduce"),
        ("training_step", "torch.distributed.all_reduce"),
        ("validation_step", "torch.distributed.all_gather"),
    ],
)
def test_collective_in_pipeline_step_is_refused(hook, name, conformance):
    first, last = conformance.ranks(communicates, PLACES["p2"], hook, name)
    assert last.startswith(
        f"MisconfigurationException: {name} in {hook} would wait forever: with pipeline_parallel_size=2 "
        "only the last stage"
    )
    assert "self.log(..., sync_dist=True)" in last
    assert f"The cause is on rank 1: MisconfigurationException: {name} in {hook}" in first


def test_collectives_in_steps_of_replicas_complete(conformance):
    place = Place(world_size=2, layout={"num_microbatches": 2})
    for name in ("all_gather", "barrier", "torch.distributed.all_reduce"):
        assert conformance.ranks(communicates, place, "training_step", name) == ["", ""]


class Gathers(LitNet):
    """Gathers the outputs of steps in a hook."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.gathered = self.all_gather(
            {"loss": outputs["loss"].detach(), "pair": torch.arange(2.0) + self.trainer.global_rank}
        )


def gathers(rank, place):
    module = Gathers()
    make_trainer(place, max_steps=1).fit(module, loader())
    return module.gathered


@pytest.mark.parametrize("name", ["p2", "d2", "p2d2"])
def test_all_gather_in_hook_has_every_replica_once(name, conformance):
    place = PLACES[name]
    expected = conformance.expected(gathers, DDP)[0]
    for rank, found in enumerate(conformance.ranks(gathers, place)):
        replicas = 1 if name == "p2" else 2
        assert found["loss"].shape == (replicas,)
        assert found["pair"].shape == (replicas, 2)
        if name != "p2":
            torch.testing.assert_close(found["loss"], expected["loss"])
        assert rank in found["pair"][:, 0]
