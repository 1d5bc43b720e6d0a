"""Ranks that are lost before there are process groups."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from lightning_ptdp.pipeline.p2p import PeerError
from lightning_ptdp.strategy.joining import joining

LIMIT = timedelta(seconds=2)


@dataclass(frozen=True)
class Place:
    """What is asked of Lightning's cluster environment."""

    main_port: int
    main_address: str = "127.0.0.1"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A store as torchrun keeps it."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Place(store.port)
    del store


def fail(place: Place, rank: int, world_size: int, said: dict[int, str], error: Exception | None = None) -> None:
    try:
        with joining(place, rank=rank, world_size=world_size, limit=LIMIT):
            raise error or dist.DistStoreError("wait timeout")
    except PeerError as lost:
        said[rank] = str(lost)


def test_a_rank_that_does_not_come(place: Place) -> None:
    said: dict[int, str] = {}
    fail(place, 0, 4, said)
    fail(place, 2, 4, said)
    assert said == {
        0: "rank 0 could not join the other ranks: ranks 1, 2, 3 did not come: wait timeout",
        2: "rank 2 could not join the other ranks: ranks 1, 3 did not come: wait timeout",
    }


def test_a_rank_that_came_and_was_lost(place: Place) -> None:
    with joining(place, rank=1, world_size=3, limit=LIMIT):
        pass
    said: dict[int, str] = {}
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer")
    threads = [threading.Thread(target=fail, args=(place, rank, 3, said, gloo)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(said) == [0, 2]
    assert all("could not join the other ranks: rank 1 came and was lost: [gloo" in text for text in said.values())


def test_a_store_that_is_not_there(place: Place) -> None:
    said: dict[int, str] = {}
    fail(Place(1), 1, 2, said)
    assert "rank 1 could not join the other ranks: rank 0, which keeps the store at 127.0.0.1:1 (or torchrun does)" in said[1]


def test_errors_of_other_kinds_pass(place: Place) -> None:
    with pytest.raises(KeyError), joining(place, rank=0, world_size=2, limit=LIMIT):
        raise KeyError("mine")
