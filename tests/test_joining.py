"""Ranks that are lost before there are process groups."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
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


GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer")


def together(
    place: Place, ranks: Sequence[int], world_size: int, dying: Sequence[int] = (), error: Exception = GLOO
) -> dict[int, Any]:
    """What each of the ranks, threads here, got: its store, or the error that it ended with. Those that die say nothing."""
    found: dict[int, Any] = {}

    def join(rank: int) -> None:
        try:
            with joining(place, rank=rank, world_size=world_size, limit=LIMIT) as store:
                found[rank] = store
                if rank not in dying and dying:
                    raise error
        except PeerError as lost:
            found[rank] = str(lost)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_a_life_does_not_see_what_an_earlier_one_left(place: Place) -> None:
    for life in range(3):
        stores = together(place, range(3), 3)
        assert not stores[1].check(["address/0"])
        stores[0].set("address/0", str(life))
        assert [stores[rank].get("address/0") for rank in range(3)] == [str(life).encode()] * 3


def test_a_rank_that_does_not_come(place: Place) -> None:
    together(place, range(4), 4)  # an earlier life, in which all came
    found = together(place, [0, 2], 4, dying=[2])
    assert found[0] == "rank 0 could not join the other ranks: ranks 1, 3 did not come: 2 of 4 ranks came within 2 s"
    found = together(place, [1], 2)
    assert found[1].startswith("rank 1 could not join the other ranks: rank 0 did not come: ")


def test_a_rank_that_does_not_come_to_the_store_of_rank_0(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = Place(probe.getsockname()[1])
    found = together(free, [0, 2], 3, dying=[1])
    for rank in (0, 2):
        assert found[rank].startswith(f"rank {rank} could not join the other ranks: rank 1 did not come: ")


def test_a_rank_that_came_and_was_lost(place: Place) -> None:
    found = together(place, range(3), 3, dying=[1])
    for rank in (0, 2):
        assert found[rank] == f"rank {rank} could not join the other ranks: rank 1 came and was lost: {GLOO}"


def test_a_store_that_is_not_there(place: Place) -> None:
    said = together(Place(1), [1], 2)[1]
    assert "rank 1 could not join the other ranks: rank 0, which keeps the store at 127.0.0.1:1 (or torchrun does)" in said


def test_a_store_that_listens_and_does_not_answer() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        said = together(Place(listening.getsockname()[1]), [1], 2)[1]
    assert said.endswith("(or torchrun does), does not answer: no answer within 2 s")


def test_errors_of_other_kinds_pass(place: Place) -> None:
    with pytest.raises(KeyError), joining(place, rank=0, world_size=1, limit=LIMIT):
        raise KeyError("mine")
