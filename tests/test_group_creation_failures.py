"""Ranks that freeze, die or are missing during group creation, in real processes."""

import contextlib
import io
import logging
import multiprocessing
import os
import signal
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_ptdp.pipeline.p2p import PeerError
from lightning_ptdp.pipeline.watchdog import Watchdog
from lightning_ptdp.strategy.expected_ranks import ExpectedRanks
from lightning_ptdp.strategy.rendezvous import join
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh
from lightning_ptdp.world.rendezvous_address import listen_on_loopback, rendezvous_store
from tests.conformance.toys import LitNet, Place, loader, make_trainer
from tests.pool import PRELOAD
from tests.processes import listening

pytestmark = pytest.mark.thorough

LIMIT_S = 4.0
LONG_S = 600.0
HANGS_S = 60.0
"""Time after which a test counts as hanging."""


def _join(rank, parent, port, limit_s, world_size):
    """Join the ranks and send the outcome and the log to the parent.

    Send "making" before group creation and wait for the parent's answer.
    """
    torch.set_num_threads(1)
    limit = timedelta(seconds=limit_s)
    crowd = ExpectedRanks(
        rank=rank, world_size=world_size, address="127.0.0.1", port=port, say_every_s=0.5
    )
    logged = io.StringIO()
    logging.getLogger("lightning_ptdp").addHandler(logging.StreamHandler(logged))

    def open_store():
        return rendezvous_store("127.0.0.1", port, keeps=rank == 0, one_machine=True, limit=limit)

    def make(store):
        parent.send("making")
        parent.recv()
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
        )
        layout = ParallelLayout(world_size=world_size, pipeline_parallel_size=world_size)
        return ProcessMesh.create(
            layout=layout, rank=rank, timeout=limit, device=torch.device("cpu")
        )

    listen_on_loopback()
    try:
        join(crowd, open_store=open_store, make=make, limit=limit)
        ended = "joined"
    except PeerError as error:
        ended = str(error)
    parent.send(ended)
    parent.send(logged.getvalue())
    with contextlib.suppress(EOFError):
        parent.recv()
    os._exit(0)


def _train(rank, parent, port, limit_s, world_size):
    """Train and send the outcome to the parent.

    Send "joined" before creating the watchdog and wait for the parent's answer.
    """
    torch.set_num_threads(1)
    sizes = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "one",
    }
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    os.environ.update(sizes | place)
    create = Watchdog.create

    def later(**kwargs):
        parent.send("joined")
        parent.recv()
        return create(**kwargs)

    Watchdog.create = later
    layout = {"pipeline_parallel_size": world_size, "num_microbatches": 2, "timeout_s": limit_s}
    try:
        make_trainer(Place(world_size=world_size, layout=layout)).fit(LitNet(), loader())
        ended = "trained"
    except PeerError as error:
        ended = str(error)
    parent.send(ended)
    os._exit(0)


def _begin(parent, what, *args):
    """Run ``what`` after the parent's signal, so that all ranks start together.

    On a busy machine, processes start seconds apart, as long as the limits for joining.
    """
    parent.send("started")
    parent.recv()
    what(*args)


@dataclass(frozen=True)
class Rank:
    process: Any
    connection: Connection

    def says(self):
        assert self.connection.poll(HANGS_S), "the rank hangs"
        return str(self.connection.recv())


@pytest.fixture
def ranks():
    """Start ranks that join, and kill them at the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    started = []

    def start(limit_s, *, world_size=3, come=(0, 1, 2), what=_join, limit_of_0_s=None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in come:
            here, there = context.Pipe()
            limit = limit_of_0_s if limit_of_0_s and rank == 0 else limit_s
            process = context.Process(
                target=_begin, args=(there, what, rank, there, port, limit, world_size), daemon=True
            )
            process.start()
            there.close()
            started.append(Rank(process, here))
        for one in started:
            assert one.says() == "started"
        for one in started:
            one.connection.send("join")
        return started

    yield start
    for rank in started:
        rank.process.kill()
        rank.process.join(HANGS_S)


def lose(ranks, doomed, how):
    """Send signal ``how`` to a rank before group creation and return the others' messages."""
    for rank in ranks:
        assert rank.says() == "making"
    os.kill(ranks[doomed].process.pid, how)
    others = {number: rank for number, rank in enumerate(ranks) if number != doomed}
    for rank in others.values():
        rank.connection.send("go on")
    return {number: rank.says() for number, rank in others.items()}


@pytest.mark.parametrize("doomed", [0, 2])
def test_rank_frozen_during_group_creation_is_named(ranks, doomed):
    """torch waits without limit for a frozen store."""
    said = lose(ranks(LIMIT_S), doomed, signal.SIGSTOP)
    whom = (
        "rank 0 (or torchrun), which hosts the store"
        if doomed == 0
        else f"rank {doomed} joined and then disappeared"
    )
    for rank, text in said.items():
        assert text.startswith(f"rank {rank} could not join the other ranks: {whom}"), text
        assert "creating the process groups" in text


@pytest.mark.parametrize("doomed", [0, 2])
def test_rank_killed_during_group_creation_is_named(ranks, doomed):
    together = ranks(LONG_S)
    started = time.monotonic()
    said = lose(together, doomed, signal.SIGKILL)
    whom = (
        "rank 0 (or torchrun), which hosts the store"
        if doomed == 0
        else f"rank {doomed} joined and then disappeared (the process has ended), "
    )
    for rank, text in said.items():
        assert text.startswith(f"rank {rank} could not join the other ranks: {whom}"), text
    assert time.monotonic() - started < HANGS_S / 2


def test_store_host_killed_after_joining_is_named(ranks):
    """torch retries for twice its limit to connect to a lost store."""
    joined, other = ranks(LONG_S, world_size=2, come=(0, 1), what=_train)
    assert [joined.says(), other.says()] == ["joined"] * 2
    joined.process.kill()
    joined.process.join(HANGS_S)
    other.connection.send("go on")
    said = other.says()
    assert said.startswith("rank 1 (pipeline 1, "), said
    assert "rank 0 (or torchrun), which hosts the store for these reports, has not answered" in said


def test_rank_killed_before_first_report_is_named(ranks):
    """Rank 0 must report the missing rank, because the store ends with rank 0."""
    together = ranks(LONG_S, what=_train)
    assert [rank.says() for rank in together] == ["joined"] * 3
    together[2].process.kill()
    together[2].process.join(HANGS_S)
    for rank in together[:2]:
        rank.connection.send("go on")
    for rank in together[:2]:
        assert "o answer from rank 2" in rank.says()


def test_rank_with_longer_limit_names_missing_rank(ranks):
    """A rank that waits longer than rank 0 also names the missing rank.

    Its limit may be longer, or it may have started later. The store ends with rank 0.
    """
    first, second = ranks(LONG_S, come=(0, 1), limit_of_0_s=LIMIT_S)
    assert first.says().startswith("rank 0 could not join the other ranks: rank 2 did not join, ")
    first.process.kill()
    assert second.says().startswith(
        "rank 1 could not join the other ranks: rank 2 did not join, while waiting for all ranks: "
    )


def test_waiting_rank_logs_missing_rank(ranks):
    first, *_ = ranks(LIMIT_S, world_size=4)
    assert first.says().startswith(
        "rank 0 could not join the other ranks: rank 3 did not join, while waiting for all ranks: "
    )
    logged = first.says()
    assert "rank 0 has waited" in logged and "for rank 3, 3 of 4 joined" in logged


def test_single_machine_listens_only_on_loopback(ranks):
    together = ranks(LONG_S)
    for rank in together:
        assert rank.says() == "making"
        rank.connection.send("go on")
    assert [rank.says() for rank in together] == ["joined"] * 3
    found = listening([rank.process.pid for rank in together])
    assert len(found) >= 4  # the store, and the gloo socket of each rank
    assert all(address.startswith("127.") for address in found), found
