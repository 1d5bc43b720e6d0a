"""SIGTERM or Ctrl-C to one rank: all ranks save and stop, and a resumed run is bitwise equal."""

import os
import signal
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ptdp.callbacks import SaveOnSignal
from lightning_ptdp.callbacks.save_on_signal import _signals
from lightning_ptdp.checkpoint import read_metadata
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.strategy.stopping import StopRequest
from tests.parity import make_trainer
from tests.tiny_gpt import LitTiny, PaddedTokens, Run

pytestmark = pytest.mark.thorough


class Terminate(L.Callback):
    """Sends a signal to this process at the start of a step."""

    def __init__(self, step: int, number: int) -> None:
        self._step, self._number = step, number

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self._step:
            os.kill(os.getpid(), self._number)


def _handlers():
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def _train(rank, folder, signalled, sent, async_save, resume, saver="SaveOnSignal"):
    L.seed_everything(3, verbose=False)
    # background processes of a shell ignore SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = _handlers()
    strategy = PTDPStrategy(pipeline_parallel_size=2, num_microbatches=2, async_save=async_save)
    trainer = make_trainer(
        strategy,
        2,
        max_steps=5,
        default_root_dir=folder,
        callbacks=[
            SaveOnSignal() if saver == "SaveOnSignal" else OnExceptionCheckpoint(folder),
            *([Terminate(1, sent)] if rank == signalled else []),
        ],
        enable_checkpointing=saver != "SaveOnSignal",
    )
    data = PaddedTokens(8)
    sampler = DistributedSampler(data, **strategy.distributed_sampler_kwargs, shuffle=False)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    if signalled is None:
        trainer.fit(LitTiny(Run(layers=4)), loader, ckpt_path=resume)
        assert _handlers() == before
    else:
        with pytest.raises(SystemExit) as info:
            trainer.fit(LitTiny(Run(layers=4)), loader)
        assert isinstance(info.value, SIGTERMException) == (sent == signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) == before[1]
        signal.signal(signal.SIGTERM, before[0])  # the pool reuses this process
    return trainer.global_step, strategy.gather_state_dict() if signalled is None else {}


@pytest.mark.parametrize(
    ("signalled", "sent", "async_save", "saver"),
    [
        (0, signal.SIGTERM, False, "SaveOnSignal"),
        (1, signal.SIGTERM, True, "SaveOnSignal"),
        (0, signal.SIGINT, True, "SaveOnSignal"),
        (1, signal.SIGINT, False, "SaveOnSignal"),
        (1, signal.SIGINT, True, "OnExceptionCheckpoint"),
    ],
)
def test_signal_to_one_rank_saves_and_stops_all_ranks(
    pool, tmp_path, signalled, sent, async_save, saver
):
    args = (str(tmp_path), signalled, sent, async_save, None, saver)
    steps = [step for step, _ in pool.run(_train, world_size=2, args=args)]
    assert steps[0] == steps[1] in (1, 2, 3)
    name = "on_signal.ckpt" if saver == "SaveOnSignal" else "on_exception.ckpt"
    assert os.readlink(tmp_path / "latest") == name
    assert read_metadata(tmp_path / "latest").run["global_step"] == steps[0]
    _, resumed = pool.run(
        _train, world_size=2, args=(str(tmp_path), None, 0, False, str(tmp_path / "latest"))
    )[0]
    _, whole = pool.run(_train, world_size=2, args=(str(tmp_path), None, 0, False, None))[0]
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


class Preempt(L.Callback):
    """Sends SLURM's signal during a step; ``seen`` records the calls of Lightning's handler."""

    def __init__(self):
        self.inside, self.seen = False, []

    def setup(self, trainer, *_, **__):
        signal.signal(
            signal.SIGUSR2, lambda *_: self.seen.append((self.inside, trainer.global_step))
        )
        trainer.strategy.cluster_environment = slurm()

    def on_train_batch_start(self, trainer, *_):
        self.inside = True
        if trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert self.seen == [], "the handler ran during a step"

    def on_train_batch_end(self, *_):
        self.inside = False


def slurm():
    environment = SLURMEnvironment.__new__(SLURMEnvironment)
    environment.auto_requeue, environment.requeue_signal = True, signal.SIGUSR2
    return environment


def test_lightning_signal_handler_runs_between_steps(tmp_path):
    before, preempt = signal.getsignal(signal.SIGUSR2), Preempt()
    trainer = make_trainer(
        "auto", max_steps=5, default_root_dir=tmp_path, callbacks=[preempt, SaveOnSignal()]
    )
    try:
        trainer.fit(LitTiny(Run(layers=2)), DataLoader(PaddedTokens(40), batch_size=8))
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert trainer.global_step == 5, (
        "training must continue: Lightning's handler saves and requeues, SLURM ends the job"
    )
    assert preempt.seen == [(False, 3)]


def test_slurm_requeue_signal_is_deferred():
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert _signals(trainer)[2:] == ()
    environment = trainer.strategy.cluster_environment = slurm()
    assert _signals(trainer)[2:] == (signal.SIGUSR2,)
    environment.auto_requeue = False
    assert _signals(trainer)[2:] == ()


def _train_again(rank):
    strategy = PTDPStrategy(timeout_s=77)
    trainer = make_trainer(strategy, 2, max_steps=1, callbacks=[SaveOnSignal()])
    with mock.patch("torch.distributed.new_group", wraps=dist.new_group) as made:
        for steps in (1, 2):
            trainer.fit_loop.epoch_loop.max_steps = steps
            trainer.fit(LitTiny(Run(layers=2)), DataLoader(PaddedTokens(8), batch_size=2))
            assert trainer.global_step == steps
    return [
        call.kwargs["timeout"].total_seconds()
        for call in made.call_args_list
        if call.kwargs.get("backend") == "gloo" and not call.args
    ]


def test_further_fit_keeps_group_with_time_limit_of_strategy(pool):
    assert pool.run(_train_again, world_size=2) == [[77], [77]]


@pytest.mark.parametrize("callbacks", [[], [SaveOnSignal()]])
def test_message_names_the_callback_only_if_it_is_missing(callbacks, capfd):
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=callbacks)
    notes = StopRequest(trainer, alone=True)._notes
    notes.take()
    notes.note(signal.SIGINT, None)
    said = capfd.readouterr().err
    assert "Ctrl-C: training ends after this step" in said
    assert ("SaveOnSignal" in said) == (not callbacks)
