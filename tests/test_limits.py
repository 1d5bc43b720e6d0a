"""Time limits of tests, which count only the time in which processes could run."""

import multiprocessing
import os
import time

import pytest

from tests.limits import Limit

pytestmark = pytest.mark.thorough


def _spin(core, stop):
    os.sched_setaffinity(0, {core})
    while not stop.is_set():
        pass


@pytest.fixture
def two_on_a_core():
    context = multiprocessing.get_context("fork")
    stop, core = context.Event(), min(os.sched_getaffinity(0))
    processes = [context.Process(target=_spin, args=(core, stop)) for _ in range(2)]
    for process in processes:
        process.start()
    yield [process.pid for process in processes if process.pid]
    stop.set()
    for process in processes:
        process.join()


def test_wait_for_core_does_not_count(two_on_a_core):
    limit, start = Limit(30, lambda: two_on_a_core), time.monotonic()
    while limit.left() < 30 - (time.monotonic() - start) + 0.5:
        assert limit.left() > 0, "the limit ignores that two processes share one core"


def test_hang_is_detected_in_time():
    limit, start = Limit(2, lambda: [os.getpid()]), time.monotonic()
    while limit.left() > 0:
        time.sleep(0.1)
        assert time.monotonic() - start < 10 * 2 + 1


def test_hard_limit_applies_despite_delays(monkeypatch):
    monkeypatch.setattr("tests.limits._run_delay", lambda pid: time.monotonic() * 2)
    limit = Limit(0.2, lambda: [os.getpid()])
    while limit.left() > 0:
        time.sleep(0.1)
