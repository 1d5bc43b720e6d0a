"""Reports of the worker pool about ranks that fail or hang."""

import os
import signal
import threading

import pytest

from tests import pool
from tests.pool import Pool, WorkerFailure

pytestmark = pytest.mark.thorough


def restore_signal(rank):
    """Restore the default handler, as the end of a Trainer does."""
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def wait_forever(rank):
    threading.Event().wait()


def test_stacks_of_hanging_ranks_are_reported():
    workers = Pool()
    try:
        workers.run(restore_signal, world_size=2)
        with pytest.raises(WorkerFailure) as failure:
            workers.run(wait_forever, world_size=2, limit=1)
        assert str(failure.value).count("in wait_forever") == 2
    finally:
        workers.close()


def own_rank(rank):
    return rank


def test_workers_that_do_not_connect_are_replaced(monkeypatch):
    workers = Pool()
    try:
        workers.run(own_rank, world_size=2)
        monkeypatch.setattr(pool, "_CONNECT_S", 1.0)
        stopped = workers._workers[1][0].pid
        os.kill(stopped, signal.SIGSTOP)
        with pytest.warns(UserWarning, match="init_process_group"):  # in the stack of the other one
            assert workers.run(own_rank, world_size=2) == [0, 1]
        assert workers._workers[1][0].pid != stopped
    finally:
        workers.close()
