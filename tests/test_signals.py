"""Ctrl-C: the first requests a stop, a copy is ignored, the second stops immediately."""

import os
import signal
import sys

import pytest

from lightning_ptdp.base import signals
from lightning_ptdp.base.signals import SignalNotes, StoppedNow, breakable
from lightning_ptdp.cli.failures import terminate_on_sigterm
from lightning_ptdp.strategy.stopping import INTERRUPTED, ending_on_sigterm, forwarding_ctrl_c


@pytest.fixture
def now(monkeypatch):
    """Return a fake clock in seconds; Ctrl-C raises, as under pytest."""
    clock, before = [100.0], signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    yield clock
    signal.signal(signal.SIGINT, before)


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def test_first_ctrl_c_is_recorded_and_second_raises(now, capfd):
    notes = SignalNotes("saves first")
    notes.take(signal.SIGINT, signal.SIGTERM)
    try:
        ctrl_c()
        now[0] += 0.5
        ctrl_c()
        assert notes.received == {signal.SIGINT}
        now[0] += 1
        with pytest.raises(StoppedNow):
            ctrl_c()
    finally:
        notes.give_back()
    assert capfd.readouterr().err == "\nsaves first\n"
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


def test_wait_with_ignored_sigint_can_be_interrupted(now):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with breakable():
        ctrl_c()  # a copy of the signal that led here
        now[0] += 2
        with pytest.raises(StoppedNow):
            ctrl_c()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


class Launcher:
    """Launcher that records the signals sent to its processes."""

    def __init__(self, *procs):
        self.procs, self.told = procs, []

    def kill(self, number):
        self.told.append(number)


def in_launcher(launcher, now, *, times, error):
    with forwarding_ctrl_c(launcher):
        for time in times:
            now[0] = 100 + time
            ctrl_c()
        raise error


def test_launcher_terminates_processes_then_kills_them(now):
    launcher = Launcher("a process")
    with pytest.raises(KeyboardInterrupt):
        in_launcher(launcher, now, times=(0, 0.5), error=SystemExit())
    assert {*launcher.told} == {signal.SIGTERM}
    with pytest.raises(StoppedNow):
        in_launcher(launcher, now, times=(0, 2), error=SystemExit())
    assert launcher.told[-1] == signal.SIGKILL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupted_processes_raise_keyboard_interrupt(now):
    class Ended(Exception):
        exit_code = INTERRUPTED

    for launcher, times, error, expected in (
        (Launcher("a process"), (), Ended(), KeyboardInterrupt),
        (Launcher("a process"), (), ZeroDivisionError(), ZeroDivisionError),
        (Launcher(), (0.0,), ZeroDivisionError("there is nobody to hand it to"), KeyboardInterrupt),
    ):
        with pytest.raises(expected):
            in_launcher(launcher, now, times=times, error=error)


def test_user_signal_handler_is_kept(now):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with forwarding_ctrl_c(Launcher("a process")):
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("process", ["rank", "worker of a pool"])
def test_sigterm_before_training_closes_loggers_of_its_rank_only(process, tmp_path):
    """Under ``ptdp``, whose handler the rank has inherited."""

    class Launcher:
        def kill(self, signum):
            (tmp_path / "killed").touch()

    def close():
        (tmp_path / "closed").write_text(type(sys.exc_info()[1]).__name__)

    with terminate_on_sigterm():
        rank = os.fork()
        if rank == 0:
            try:
                with ending_on_sigterm(Launcher(), close):
                    if process == "worker of a pool" and (worker := os.fork()):
                        os._exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) + 100)
                    signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(1)
        _, status = os.waitpid(rank, 0)
    ended = os.waitstatus_to_exitcode(status)
    if process == "rank":
        assert ended == -signal.SIGTERM
        assert (tmp_path / "closed").read_text() == "KeyboardInterrupt"
    else:
        assert ended == 100 - signal.SIGTERM
    assert (tmp_path / "killed").exists() == (process == "rank")
