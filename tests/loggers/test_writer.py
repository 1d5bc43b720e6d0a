"""Tests of the background writer: order, flushing, and an unavailable store."""

import os
import threading

import pytest

from lightning_ptdp.loggers.background_writer import BackgroundWriter

LIMIT_S = 30.0


def nothing():
    """Do nothing. All items are written before it runs."""


class Store:
    """Store that can be made unavailable and whose writes can be blocked."""

    def __init__(self):
        self.items = []
        self.calls = []
        self.broken = False
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()

    def write(self, items):
        self.entered.set()
        self.open.wait()
        if self.broken:
            raise ConnectionError("the server is away")
        self.calls.append(len(items))
        self.items += items


def test_items_are_written_in_order_and_batched():
    store = Store()
    store.open.clear()
    writer = BackgroundWriter(store.write, most=4)
    writer.put(0)
    store.entered.wait()  # the thread holds item 0 and the others queue up behind it
    for item in range(1, 10):
        writer.put(item)
    store.open.set()
    writer.run(nothing, limit_s=LIMIT_S)
    assert store.items == list(range(10))
    assert store.calls == [1, 4, 4, 1]


@pytest.mark.filterwarnings("ignore:logging failed")
def test_recovered_store_receives_all_items():
    store = Store()
    writer = BackgroundWriter(store.write)
    store.broken = True
    for item in range(3):
        writer.put(item)
    with pytest.raises(ConnectionError):
        writer.run(nothing, limit_s=0.1)
    store.broken = False
    writer.put(3)
    writer.run(nothing, limit_s=LIMIT_S)
    assert store.items == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:logging failed")
def test_temporary_store_failure_is_retried():
    store = Store()
    writer = BackgroundWriter(store.write)
    store.broken = True
    writer.put(0)
    with pytest.raises(ConnectionError):
        writer.run(nothing, limit_s=0.1)
    assert writer.unwritten == (0,)
    failed = threading.Event()

    def write(items):
        store.broken = not failed.is_set()
        failed.set()
        store.write(items)

    writer._write = write
    writer.run(nothing, limit_s=LIMIT_S)
    assert (store.items, writer.unwritten) == ([0], ())


def test_unresponsive_store_does_not_block_training():
    store = Store()
    store.open.clear()
    writer = BackgroundWriter(store.write)
    for item in range(3):
        writer.put(item)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        writer.run(nothing, limit_s=0.1)
    assert writer.unwritten == (0, 1, 2)
    store.open.set()
    writer.run(nothing, limit_s=LIMIT_S)
    assert store.items == [0, 1, 2]


def test_failed_action_after_items_is_retried():
    store, failures = Store(), [ConnectionError("the server is away")]

    def action():
        if failures:
            raise failures.pop()
        store.items.append(-1)

    writer = BackgroundWriter(store.write)
    writer.put(1)
    writer.run(action, limit_s=LIMIT_S)
    assert store.items == [1, -1]


def test_failed_deferred_action_gives_warning():
    store = Store()
    writer = BackgroundWriter(store.write)
    writer.put(1)
    writer.later(lambda: store.items.append(-1), limit_s=LIMIT_S)

    def fails():
        raise ConnectionError("the server is away")

    def both():
        writer.later(fails, limit_s=0.0)
        writer.run(nothing, limit_s=LIMIT_S)

    with pytest.warns(UserWarning, match="logging failed; training continues: the server is away"):
        both()
    assert store.items == [1, -1]


def test_fork_waits_for_running_write():
    """A child forked during a write would inherit store locks that are never released."""
    lock, begun, end = threading.Lock(), threading.Event(), threading.Event()

    def write(items):
        with lock:
            begun.set()
            end.wait(0.5)

    writer = BackgroundWriter(write)
    writer.put(1)
    assert begun.wait(10)
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.acquire(timeout=1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    writer.run(lambda: None, limit_s=10)
