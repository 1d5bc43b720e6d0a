"""Termination of the worker processes that a launcher started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
from lightning.pytorch import Trainer

from lightning_ptdp.cli.error_messages import Terminated

_PATIENCE_S = 3.0
_GRACE_S = 10.0
_SAVING_S = 60.0


@contextmanager
def ending_workers(trainer: Trainer) -> Iterator[None]:
    """Stop all workers of ``trainer`` if the block ends with an error.

    Workers are interrupted as by Ctrl-C, so that they close their loggers. Workers that do not end
    in time are killed. On Ctrl-C the terminal has already interrupted them, and a second interrupt
    would break their cleanup. Workers therefore get some time before they are interrupted. SIGTERM,
    after which ranks save a checkpoint, is passed on to the workers, but not to their data-loading
    processes.
    """
    try:
        yield
    except BaseException as error:
        started = _started(trainer)
        workers = [*started]
        for process in started:
            with suppress(psutil.NoSuchProcess):
                workers += process.children(recursive=True)
        if isinstance(error, Terminated):
            _signal(started, signal.SIGTERM)
        _, workers = psutil.wait_procs(
            workers, timeout=_SAVING_S if isinstance(error, Terminated) else _PATIENCE_S
        )
        _signal(workers, signal.SIGINT)
        _, workers = psutil.wait_procs(workers, timeout=_GRACE_S)
        _signal(workers, signal.SIGKILL)
        psutil.wait_procs(workers, timeout=_GRACE_S)
        raise


def _started(trainer: Trainer) -> list[psutil.Process]:
    processes = []
    for process in getattr(trainer.strategy.launcher, "procs", None) or []:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(process.pid))
    return processes


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
