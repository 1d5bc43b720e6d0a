"""Behaviours 19 (fork) to 23: names of the strategy, copies of a Trainer and forked processes."""

import copy
import importlib
import multiprocessing
import os
import pickle
import sys
from functools import partial

import lightning.pytorch as L
import psutil
import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ptdp.checkpoint.save_agreement import own_rank
from lightning_ptdp.strategy import PTDPStrategy, strategy_class
from tests.conformance.toys import (
    FEATURES,
    P2,
    LitNet,
    Losses,
    Place,
    assert_weights,
    layers,
    loader,
    make_trainer,
    weights,
)
from tests.pool import WorkerFailure

pytestmark = pytest.mark.thorough

QUIET = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def other_namespace(rank, strategy, devices):
    import pytorch_lightning as pl

    class LitOther(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = layers()

        def training_step(self, batch, batch_idx):
            loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    if isinstance(strategy, dict):
        strategy = strategy_class("pytorch_lightning")(**strategy)
    trainer = pl.Trainer(strategy=strategy, devices=devices, **QUIET)
    assert isinstance(trainer.strategy, pl.strategies.ParallelStrategy)
    assert not isinstance(trainer.strategy, PTDPStrategy)
    pickle.loads(pickle.dumps(trainer))
    trainer.fit(LitOther(), loader())
    return (
        type(trainer.strategy).__name__,
        trainer.global_step,
        "train_loss" in trainer.callback_metrics,
    )


@pytest.mark.parametrize(
    ("strategy", "devices"), [("ptdp", 1), ("ptdp", 2), (P2, 2)], ids=["one", "d2", "p2"]
)
def test_strategy_in_pytorch_lightning_namespace(strategy, devices, pool):
    steps = 4 if strategy == P2 or devices == 1 else 2
    for found in pool.run(other_namespace, world_size=devices, args=(strategy, devices)):
        assert found == ("PTDPStrategy", steps, True)


def by_name(rank, name):
    trainer = L.Trainer(strategy=name, devices=1, **QUIET)
    if name != "ptdp_spawn":  # skip the imports of a new process
        trainer.fit(LitNet(), loader())
    return isinstance(trainer.strategy, PTDPStrategy), trainer.strategy.config.start_method


@pytest.mark.parametrize(
    ("name", "method"), [("ptdp", "popen"), ("ptdp_spawn", "spawn"), ("ptdp_fork", "fork")]
)
def test_strategy_names_with_one_device(name, method, fresh):
    assert fresh.run(by_name, world_size=1, args=(name,)) == [(True, method)]


def copy_around_fit(rank, place):
    trainer = make_trainer(place, callbacks=[Losses()])
    for _ in range(2):  # before and after a fit
        for other in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
            assert isinstance(other.strategy, PTDPStrategy)
            assert other.strategy.config == trainer.strategy.config
            assert other.global_step == trainer.global_step
        trainer.fit(LitNet(), loader())


@pytest.mark.parametrize("place", [Place(), Place(world_size=2, layout=P2)], ids=["one", "p2"])
def test_trainer_is_copied_and_pickled(place, conformance):
    conformance.ranks(copy_around_fit, place)


class LitFails(LitNet):
    """Raises on rank 1."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and own_rank() == 1:
            raise ZeroDivisionError("the user's own mistake")
        return super().training_step(batch, batch_idx)


def in_a_batch_script(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", "7")
        trainer = L.Trainer(
            strategy="ptdp", devices=1, plugins=[SLURMEnvironment(auto_requeue=False)], **QUIET
        )
        trainer.fit(LitNet(), loader())
        assert trainer.world_size == 1
    return trainer.global_step


def test_one_device_in_slurm_job_without_srun(pool):
    assert pool.run(in_a_batch_script, world_size=1) == [4]


def in_a_notebook(rank, strategy, devices):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "ps1", ">>> ", raising=False)
        patch.setattr(
            "lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True
        )
        try:
            trainer = L.Trainer(
                strategy=PTDPStrategy(**strategy) if isinstance(strategy, dict) else strategy,
                devices=devices,
                **QUIET,
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        trainer.fit(LitNet(), loader())
        return f"{trainer.max_epochs} epoch"


@pytest.mark.parametrize(
    ("strategy", "devices", "answer"),
    [
        (
            "ptdp",
            2,
            "MisconfigurationException: start_method='popen' cannot start processes from a "
            "notebook or an interactive prompt",
        ),
        (
            {**P2, "start_method": "spawn"},
            2,
            "MisconfigurationException: start_method='spawn' cannot",
        ),
        ("ptdp", 1, "1 epoch"),
        ("ptdp_fork", 2, "1 epoch"),
    ],
)
def test_notebook_requires_fork_for_several_devices(strategy, devices, answer, fresh):
    (found,) = fresh.run(in_a_notebook, world_size=1, args=(strategy, devices))
    assert found.startswith(answer)
    if "cannot" in answer:
        assert 'Trainer(strategy="ptdp_fork")' in found


@pytest.mark.parametrize("namespace", ["lightning.fabric", "lightning_fabric"])
def test_fabric_is_refused(namespace):
    fabric = importlib.import_module(namespace)
    with pytest.raises(
        ValueError, match=r"'ptdp' does not work with Fabric.*Use lightning.pytorch.Trainer"
    ):
        fabric.Fabric(strategy="ptdp", accelerator="cpu", devices=1)


def forked(rank, place, module):
    """Train with ranks that Lightning starts itself, and validate afterwards."""
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    L.seed_everything(1, verbose=False)
    trainer, net = make_trainer(place), module()
    trainer.fit(net, loader(), loader())
    trained = {name: value.detach().clone() for name, value in net.state_dict().items()}
    val_loss = float(trainer.callback_metrics["val_loss"])
    again = trainer.validate(net, loader(), verbose=False)[0]["val_loss"]
    assert not psutil.Process().children(recursive=True), "processes are left behind"
    return trained, val_loss, again


def alone(rank):
    L.seed_everything(1, verbose=False)
    trainer = make_trainer(Place(reference="auto"))
    trainer.fit(LitNet(), loader())
    return weights(trainer)


def test_parent_process_gets_whole_model_from_forked_ranks(fresh, pool):
    place = Place(world_size=2, layout={**P2, "start_method": "fork"})
    ((trained, val_loss, again),) = fresh.run(forked, world_size=1, args=(place, LitNet))
    assert_weights(trained, pool.run(alone, world_size=1)[0])
    assert trained["net.0.weight"].shape == (16, FEATURES)
    assert again == pytest.approx(val_loss, rel=1e-5)


class LitExpanded(LitNet):
    """Has an expanded buffer, which cannot be written to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1).expand(4))

    def training_step(self, batch, batch_idx):
        self.scale = self.scale + 1
        return super().training_step(batch, batch_idx)


def test_parent_process_gets_buffer_that_was_expanded(fresh):
    place = Place(world_size=2, layout={"start_method": "fork"})
    ((trained, _, _),) = fresh.run(forked, world_size=1, args=(place, LitExpanded))
    assert len(trained["scale"].unique()) == 1 < trained["scale"][0]


@pytest.mark.parametrize("method", ["fork", "popen"])
def test_daemonic_process_starts_only_scripts(method, monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    trainer = partial(L.Trainer, strategy=PTDPStrategy(start_method=method), devices=2, **QUIET)
    if method == "popen":
        trainer()
        return
    with pytest.raises(
        MisconfigurationException, match="from a daemonic process, such as a worker"
    ):
        trainer()


def test_exception_on_one_forked_rank_ends_all_and_is_shown(fresh):
    place = Place(world_size=2, layout={**P2, "start_method": "fork"})
    with pytest.raises(WorkerFailure, match="the user's own mistake") as failure:
        fresh.run(forked, world_size=1, args=(place, LitFails), limit=60.0)
    assert "in training_step" in str(failure.value)


class LitNotes(LitNet):
    """Records the id of the training process."""

    pid = 0

    def training_step(self, batch, batch_idx):
        self.pid = os.getpid()
        return super().training_step(batch, batch_idx)


def one_process(rank, start_method):
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    before = dict(os.environ)
    trainer, net = make_trainer(Place(layout={"start_method": start_method})), LitNotes()
    trainer.fit(net, loader(), loader())
    assert net.pid == os.getpid()
    assert len(trainer.predict(net, loader())) > 0
    assert {name: value for name, value in os.environ.items() if before.get(name) != value} == {}, (
        "the environment was changed for later Trainers"
    )


@pytest.mark.parametrize("start_method", ["popen", "fork", "spawn"])
def test_single_process_run_uses_calling_process(pool, start_method):
    pool.run(one_process, world_size=1, args=(start_method,))


def _fit_and_look(rank):
    make_trainer(Place(world_size=2, layout=P2)).fit(LitNet(), loader())
    return [name for name in os.environ if name.endswith("_SOCKET_IFNAME")]


def test_fit_leaves_no_network_interface_in_environment(pool):
    assert pool.run(_fit_and_look, world_size=2) == [[], []]
