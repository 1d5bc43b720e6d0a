"""Reports of the worker pool about ranks that fail or hang."""

import signal
import threading

import pytest

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
