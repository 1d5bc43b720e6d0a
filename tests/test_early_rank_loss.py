"""Ranks that are lost before the process groups exist."""

import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from lightning_ptdp.base.requirements import RequirementError, versions_that_matter
from lightning_ptdp.pipeline.p2p import PeerError
from lightning_ptdp.strategy import PTDPStrategy, rendezvous
from lightning_ptdp.strategy.expected_ranks import ExpectedRanks
from lightning_ptdp.strategy.rendezvous import join
from lightning_ptdp.world.rendezvous_address import listen_on_loopback, rendezvous_store

pytestmark = pytest.mark.thorough

LIMIT = timedelta(seconds=2)


@dataclass(frozen=True)
class Place:
    """Port of the store; rank 0 hosts the store unless ``kept``."""

    port: int
    kept: bool = True


@pytest.fixture
def place():
    """Host a store like torchrun."""
    # Unlike torch, listen on one interface: with slow name resolution, a store on all interfaces
    # blocks for every rank that connects.
    store = rendezvous_store("127.0.0.1", 0, keeps=True, one_machine=True, limit=LIMIT)
    yield Place(store.port)
    del store


GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer")


def joined(place, rank, world_size, make):
    crowd = ExpectedRanks(rank=rank, world_size=world_size, address="127.0.0.1", port=place.port)

    def open_store():
        return rendezvous_store(
            "127.0.0.1",
            place.port,
            keeps=rank == 0 and not place.kept,
            one_machine=True,
            limit=LIMIT,
        )

    return join(crowd, open_store=open_store, make=make, limit=LIMIT)


def together(place, ranks, world_size, dying=(), error=GLOO):
    """Join the ranks in threads and return the store or the error message of each.

    If there are ``dying`` ranks, group creation raises ``error`` on all others.
    """
    found = {}

    def make(rank, store):
        if rank not in dying and dying:
            raise error
        return store

    def run(rank):
        try:
            found[rank] = joined(place, rank, world_size, functools.partial(make, rank))
        except PeerError as lost:
            found[rank] = str(lost)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_restarted_run_ignores_keys_of_earlier_run(place):
    for life in range(3):
        stores = together(place, range(3), 3)
        assert not stores[1].check(["address/0"])
        stores[0].set("address/0", str(life))
        assert [stores[rank].get("address/0") for rank in range(3)] == [str(life).encode()] * 3


def test_missing_ranks_are_named(place):
    together(place, range(4), 4)  # an earlier run that all ranks joined
    found = together(place, [0, 2], 4, dying=[2])
    assert (
        found[0]
        == "rank 0 could not join the other ranks: ranks 1, 3 did not join, while waiting for all ranks: 2 of 4 ranks joined within 2 s"
    )
    found = together(place, [1], 2)
    assert found[1].startswith(
        "rank 1 could not join the other ranks: rank 0 did not join, while contacting rank 0: "
    )


def test_missing_rank_is_named_with_store_on_rank_0():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = Place(probe.getsockname()[1], kept=False)
    found = together(free, [0, 2], 3, dying=[1])
    for rank in (0, 2):
        assert found[rank].startswith(
            f"rank {rank} could not join the other ranks: rank 1 did not join, while waiting for "
            "all ranks: "
        )


def test_absent_rank_is_named_though_store_ends_with_rank_0(place, monkeypatch):
    """Rank 0, which hosts the store, ends once rank 1's listening thread knows the reason."""
    missed = rendezvous._missed

    def cut_off(attempt_store, rank, world_size):
        if rank:
            attempt_store.wait([f"{rendezvous._KNOWS}/1"], timedelta(seconds=20))
            raise dist.DistNetworkError("Connection reset by peer")
        return missed(attempt_store, rank, world_size)

    monkeypatch.setattr(rendezvous, "_missed", cut_off)
    monkeypatch.setattr(rendezvous, "_KNOWN_S", 0.0)
    found = together(place, [0, 1], 3)
    for rank in (0, 1):
        assert "rank 2 did not join, while waiting for all ranks" in found[rank]


def test_rank_lost_after_joining_is_named(place):
    found = together(place, range(3), 3, dying=[1])
    for rank in (0, 2):
        assert (
            found[rank]
            == f"rank {rank} could not join the other ranks: rank 1 joined and then disappeared, while creating the process groups: {GLOO}"
        )


def test_machine_with_other_versions_is_named(monkeypatch):
    store = dist.HashStore()
    store.set(rendezvous._VERSIONS, json.dumps(versions_that_matter() | {"peft": "0.19.0"}))
    changed = versions_that_matter() | {"peft": "0.19.1"}
    monkeypatch.setattr(rendezvous, "versions_that_matter", lambda: changed | {"peft": "0.19.0"})
    rendezvous._compare_versions(store, 2)
    monkeypatch.setattr(rendezvous, "versions_that_matter", lambda: changed)
    with pytest.raises(
        RequirementError, match=r"rank 1 on .* has peft 0\.19\.1, rank 0 has 0\.19\.0"
    ):
        rendezvous._compare_versions(store, 1)
    assert b"peft 0.19.1" in store.get(rendezvous._LOST), "the other ranks do not learn the reason"


def test_missing_store_is_reported(place):
    said = together(Place(1), [1], 2)[1]
    assert (
        "rank 1 could not join the other ranks: rank 0 (or torchrun), which hosts the store at "
        "127.0.0.1:1" in said
    )


def test_unresponsive_store_is_reported():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        said = together(Place(listening.getsockname()[1]), [1], 2)[1]
    assert "does not answer, while connecting to the store" in said


def test_unrelated_error_is_raised_unchanged(place):
    def make(store):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        joined(place, 0, 1, make)


def test_process_lost_before_joining_is_reported_at_once(place):
    """The parent process reports the loss at once."""
    crowd = ExpectedRanks(rank=0, world_size=2, address="127.0.0.1", port=place.port)
    store = rendezvous_store("127.0.0.1", place.port, keeps=False, one_machine=True, limit=LIMIT)
    said = "rank 1 was lost: its process ended with exit code -9"
    with pytest.raises(
        PeerError,
        match=f"^rank 0 could not join the other ranks: {said}, while waiting for all ranks",
    ):
        join(
            crowd,
            open_store=lambda: store,
            make=lambda store: store,
            limit=timedelta(seconds=600),
            ended=lambda: said,
        )


def test_ended_child_process_is_reported():
    strategy = PTDPStrategy()
    strategy._launcher = SimpleNamespace(
        procs=[subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"])]
    )
    try:
        assert strategy._ended() == ""
        strategy._launcher.procs[1].kill()
        strategy._launcher.procs[1].wait()
        assert strategy._ended() == "rank 2 was lost: its process ended with exit code -9"
    finally:
        for process in strategy._launcher.procs:
            process.kill()
            process.wait()


def test_missing_ranks_are_reported_with_launch_commands():
    crowd = ExpectedRanks(
        rank=0, world_size=6, address="10.0.0.1", port=29500, num_nodes=3, started_by_hand=True
    )
    said = crowd.missing([1, 2, 3, 4, 5])
    assert said.startswith("for ranks 1, 2, 3, 4, 5 on nodes 0, 1, 2, 1 of 6 joined; start there: ")
    for node in (1, 2):
        assert f"MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 NODE_RANK={node} {sys.orig_argv[0]}" in said
    assert "NODE_RANK=0" not in said and "that the other nodes can reach" not in said
    other = dataclasses.replace(crowd, rank=2, address="127.0.0.1")
    assert (
        "NODE_RANK=0" in other.first_of_all()
        and "that the other nodes can reach" in other.first_of_all()
    )
    assert dataclasses.replace(other, rank=3).first_of_all() == ""


def test_network_interface_set_by_user_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    listen_on_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ.pop("NCCL_SOCKET_IFNAME").startswith("lo")
