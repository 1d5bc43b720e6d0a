"""End the processes that a launcher started, whatever happens."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
from lightning.pytorch import Trainer

from lightning_ptdp.cli.errors import Terminated

__all__ = ["ending_workers"]

_PATIENCE_S = 3.0
_GRACE_S = 10.0
_SAVING_S = 60.0


@contextmanager
def ending_workers(trainer: Trainer) -> Iterator[None]:
    """Leave no worker of ``trainer`` behind when the block ends with an error.

    Workers are interrupted as by Ctrl-C, so that they close their loggers, and killed if they are not gone in time. On a
    Ctrl-C the terminal has told them already, and a second one would break the closing: they are first given time. SIGTERM, which
    ranks save after, is handed on to them, and not to the processes that read data for them.
    """
    try:
        yield
    except BaseException as error:
        workers = _alive(trainer)
        if isinstance(error, Terminated):
            for started in getattr(trainer.strategy.launcher, "procs", None) or []:
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(started.pid).terminate()
        _, workers = psutil.wait_procs(workers, timeout=_SAVING_S if isinstance(error, Terminated) else _PATIENCE_S)
        _end(workers)
        raise


def _alive(trainer: Trainer) -> list[psutil.Process]:
    found = []
    for started in getattr(trainer.strategy.launcher, "procs", None) or []:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(started.pid)
            found += [process, *process.children(recursive=True)]
    return found


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs(processes, timeout=_GRACE_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_GRACE_S)
