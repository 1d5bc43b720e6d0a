"""The writer thread: order, flushing, and what happens when the store goes away."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from lightning_ptdp.loggers.writer import BackgroundWriter


class Store:
    """A store that can be switched off, and one whose writes can be held up."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.calls: list[int] = []
        self.broken = False
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()

    def write(self, items: Sequence[int]) -> None:
        self.entered.set()
        self.open.wait()
        if self.broken:
            raise ConnectionError("the server is away")
        self.calls.append(len(items))
        self.items += items


def test_items_arrive_in_order_and_waiting_ones_together() -> None:
    store = Store()
    store.open.clear()
    writer = BackgroundWriter(store.write, most=4)
    writer.put(0)
    store.entered.wait()  # the thread holds item 0 and the others queue up behind it
    for item in range(1, 10):
        writer.put(item)
    store.open.set()
    writer.flush()
    assert store.items == list(range(10))
    assert store.calls == [1, 4, 4, 1]


@pytest.mark.filterwarnings("ignore:logging failed")
def test_a_store_that_comes_back_gets_everything() -> None:
    store = Store()
    writer = BackgroundWriter(store.write)
    store.broken = True
    for item in range(3):
        writer.put(item)
    with pytest.raises(ConnectionError):
        writer.flush()
    store.broken = False
    writer.put(3)
    writer.flush()
    assert store.items == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:logging failed")
def test_a_store_that_is_locked_for_a_moment() -> None:
    store = Store()
    writer = BackgroundWriter(store.write)
    store.broken = True
    writer.put(0)
    with pytest.raises(ConnectionError):
        writer.flush()
    assert writer.unwritten == (0,)
    failed = threading.Event()

    def write(items: Sequence[int]) -> None:
        store.broken = not failed.is_set()
        failed.set()
        store.write(items)

    writer._write = write
    writer.flush(patience_s=30)
    assert (store.items, writer.unwritten) == ([0], ())
