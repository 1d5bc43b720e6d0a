"""Tests of the watchdog.

Each rank reports its action. Users' errors pass unchanged. A frozen or lost store blocks no rank.
No threads are left behind."""

import contextlib
import gc
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from lightning_ptdp.pipeline.hang_guard import HangJudge
from lightning_ptdp.pipeline.p2p import PeerError
from lightning_ptdp.pipeline.rank_status import (
    LOST,
    Heard,
    LiveStatus,
    RankReport,
    RankStatus,
    cause_first,
)
from lightning_ptdp.pipeline.status_board import StatusBoard
from lightning_ptdp.pipeline.watchdog import Watchdog
from lightning_ptdp.schedule import Action
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh

pytestmark = pytest.mark.thorough

HANGS_S = 40.0
"""Limit in seconds after which a test counts as hung."""


def watchdog(store=None, *, rank=0, world_size=2, **options):
    ranks = options.pop("ranks", range(world_size))
    return Watchdog(
        rank=rank,
        world_size=world_size,
        ranks=ranks,
        limit_s=options.pop("limit_s", 60.0),
        store=store,
        **options,
    )


@pytest.fixture
def opened():
    """Return a factory of watchdogs that are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(*arguments, **options):
            made = watchdog(*arguments, **options)
            stack.callback(made.close)
            return made

        yield make


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("ptdp")]


# ---- reports -------------------------------------------------------------------------------------


def test_report_lists_action_of_each_rank(opened):
    store = HashStore()
    ranks = [opened(store, rank=rank, world_size=6, ranks=range(5)) for rank in range(4)]
    with contextlib.ExitStack() as stack:
        for rank in ranks[:3]:
            stack.enter_context(rank.during("step 12"))
        ranks[0].started(Action.parse("F0.3"))
        ranks[1].started(Action.parse("B1.2"))
        ranks[1].waiting("B1.2", 2)
        ranks[2].started(Action.parse("F2.1"))
        ranks[2].waiting("F2.1", 1)
        ranks[2].waiting("F2.1", None)
        ranks[2].finished(Action.parse("F2.1"))
        assert all(rank.publish() for rank in ranks)
        lines = re.sub(r"since [\d.]+ s", "since", ranks[0].explain())
        lines = re.sub(r" \(reported [\d.]+ s ago\)", "", lines).splitlines()
    assert lines == [
        "Last action of each rank:",
        "  rank 0: step 12, in F0.3 since (this rank)",
        "  rank 1: step 12, waits in B1.2 for rank 2 since",
        "  rank 2: step 12, after F2.1 since",
        "  rank 3: before its first step since",
        "  rank 4: has not reported yet",
        "  … and 1 other ranks",
        "No answer from rank 4, which has not reported yet",
    ]
    assert re.search(
        r"rank 0: failed [\d.]+ s ago \(lost another rank: no answer from rank 4\)",
        ranks[1].explain(),
    )


def test_lost_rank_is_known_once_all_answering_ranks_report_it():
    def account(failure, *, world_size=3, ended=False):
        told = LiveStatus()
        told.failure, told.ended = failure, ended
        heard = {
            rank: Heard(told.status() if rank == 1 else LiveStatus().status(), 0.0, True)
            for rank in (1, 2)
        }
        return RankReport(
            rank=0,
            own=LiveStatus().status(),
            world_size=world_size,
            asked=(1, 2),
            heard=heard,
            missing=frozenset({2}),
        )

    named = account("").lost()
    assert (
        account(named).is_known()
        and account("ValueError: mine").is_known()
        and account("", ended=True).is_known()
    )
    assert not account("").is_known() and not account(LOST).is_known()
    assert not account(named, world_size=4).is_known()


def test_rank_that_ended_earlier_is_named_as_the_cause():
    ended = LiveStatus()
    ended.ended = True
    report = RankReport(
        rank=0,
        own=LiveStatus().status(),
        world_size=2,
        asked=(1,),
        heard={1: Heard(ended.status(), time.monotonic(), True)},
        store_answers=True,
    )
    cause = "The cause is on rank 1, which ended its loop earlier: it had fewer batches"
    assert cause_first("lost another rank", report.text()).startswith(cause)


def _ranks_asked(rank):
    layout = ParallelLayout(world_size=4, pipeline_parallel_size=2)
    watched = Watchdog.create(mesh=ProcessMesh.create(layout=layout, rank=rank), limit_s=60.0)
    dist.barrier()
    try:
        return re.findall(r"  rank (\d):", watched.explain())
    finally:
        dist.barrier()
        watched.close()


def test_report_includes_ranks_without_common_group(pool):
    assert pool.run(_ranks_asked, world_size=4) == [["0", "1", "2", "3"]] * 4


def test_communication_error_is_annotated_with_report(opened):
    lost, other = dist.DistNetworkError("Connection reset by peer"), KeyError("mine")
    for error in (lost, other):
        opened(HashStore()).annotate(error)
    assert lost.__notes__[0].startswith(
        "Last action of each rank:\n  rank 0: before its first step"
    )
    assert not hasattr(other, "__notes__")


def test_action_continues_after_wait(opened):
    rank = opened(HashStore(), interval_s=0.01)
    with rank.during("step 1"):
        rank.started(Action.parse("F1.0"))
        rank.waiting("F1.0", 1)
        assert "waits in F1.0 for rank 1" in rank.explain()
        rank.waiting("F1.0", None)
        assert "in F1.0 since" in rank.explain() and "waits" not in rank.explain()
        rank.finished(Action.parse("F1.0"))
        rank.waiting("F2.0", 1)  # a send that is still outstanding at the end
        rank.waiting("F2.0", None)
        assert "after F2.0" in rank.explain()
    assert "after step 1 since" in rank.explain()


def test_innermost_activity_is_reported(opened):
    rank, other = opened(HashStore(), interval_s=0.01), opened(HashStore(), interval_s=0.01)
    with rank.during("optimizer step 5"):
        with rank.during("step 5"):
            assert "rank 0: step 5 since" in rank.explain()
        assert "rank 0: optimizer step 5 since" in rank.explain()
    with pytest.raises(PeerError) as caught, other.during("optimizer step 5"):
        fail(other, "step 5", "F0.1", dist.DistNetworkError("Connection reset by peer"))
    assert str(caught.value).count("lost another rank") == 1
    assert "rank 0: step 5, in F0.1 since" in other.explain()


def test_status_sentence_distinguishes_silence_from_work():
    live = LiveStatus()
    live.during = "step 3"
    live.set("in", Action.parse("F2.3"))
    status = RankStatus.decode(live.status().encode())
    since = r"step 3, in F2\.3 since [\d.]+ s"
    assert re.fullmatch(
        rf"{since} \(reported 0\.0 s ago\)", status.sentence(silence_s=0.0, silent_after_s=4)
    )
    assert re.fullmatch(
        rf"{since} \(this rank\)", status.sentence(silence_s=None, silent_after_s=4)
    )
    assert (
        status.sentence(silence_s=17.0, silent_after_s=4)
        == "last reported 17 s ago: step 3, in F2.3"
    )
    assert status != RankStatus.decode(live.status().encode())


def test_report_of_many_ranks_names_suspects():
    # A report by hand: 39 threads of one busy process do not publish within a roll call.
    statuses = {rank: LiveStatus() for rank in range(39)}
    for rank in (20, 30):
        statuses[rank].during = statuses[rank].latest = "step 1"
    statuses[30].failure = "ZeroDivisionError: nothing\nmore"
    statuses[30].raised_at = "train.py, line 12"
    now = time.monotonic()
    heard = {rank: Heard(status.status(), now, True) for rank, status in statuses.items()}
    report = RankReport(
        rank=7,
        own=heard.pop(7).status,
        world_size=40,
        asked=[rank for rank in range(40) if rank != 7],
        heard=heard,
        missing=frozenset({39}),
        as_of=now,
        store_answers=True,
        silent_after_s=HANGS_S,
    )
    lines = report.text().splitlines()
    assert len(lines) == 21
    assert lines[-4:] == [
        "  … and 24 other ranks",
        "No answer from rank 39, which has not reported yet",
        "The cause is on rank 30: ZeroDivisionError: nothing",
        "more (train.py, line 12)",
    ]
    named = {int(rank) for rank in re.findall(r"  rank (\d+):", "\n".join(lines))}
    assert named >= {7, 30, 39}
    assert re.search(
        r"rank 30: failed [\d.]+ s ago \(ZeroDivisionError: nothing\): step 1", "\n".join(lines)
    )


def test_single_process_has_no_report():
    alone = Watchdog.create(
        mesh=ProcessMesh.create(layout=ParallelLayout(world_size=1), rank=0), limit_s=1
    )
    with alone.during("step 1"):
        alone.started(Action.parse("F0.0"))
    assert alone.explain() == ""
    assert not alone.publish()
    assert not threads()
    alone.close()


def test_report_without_store_covers_own_rank(opened):
    rank = opened(None)
    with rank.during("step 4"):
        assert re.fullmatch(
            r"Last action of each rank:\n  rank 0: step 4 since [\d.]+ s \(this rank\)\n  … and 1 "
            r"other ranks",
            rank.explain(),
        )


def fail(rank, step, action, error):
    with rank.during(step):
        rank.started(Action.parse(action))
        raise error


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad batch"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("read the docs of gloo/transport"),
        torch.OutOfMemoryError("[gloo/x.cc:1] no"),
        PeerError("of the transport"),
        KeyboardInterrupt(),
    ],
)
def test_unrelated_errors_pass_unchanged(error, opened):
    rank = opened(HashStore())
    with pytest.raises(type(error)) as caught:
        fail(rank, "step 1", "F0.0", error)
    assert caught.value is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by "
            "peer [127.0.0.1]:9"
        ),
        RuntimeError(
            "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
            "3000ms for recv operation"
        ),
        dist.DistBackendError("NCCL communicator was aborted on rank 0."),
        dist.DistNetworkError("Connection reset by peer"),
    ],
)
def test_communication_error_becomes_peer_error(error, opened):
    rank = opened(HashStore(), where="pipeline rank 0", interval_s=0.01)
    words = (
        r"rank 0 \(pipeline rank 0\) lost another rank \(step 7, in B0\.1\): (?s:.*)Last action "
        r"of each rank:\n  rank 0: step 7, in"
    )
    with pytest.raises(PeerError, match=words) as caught:
        fail(rank, "step 7", "B0.1", error)
    assert caught.value.__cause__ is error


def test_failure_is_published_at_once_and_cleared_by_next_step(opened):
    store = HashStore()
    mine, other = opened(store, interval_s=1e4), opened(store, rank=1, interval_s=1e4)
    with pytest.raises(ValueError):
        fail(other, "step 1", "F1.0", ValueError("token 9 of 8"))
    assert re.search(
        r"rank 1: failed [\d.]+ s ago \(ValueError: token 9 of 8\): step 1, in F1\.0",
        mine.explain(),
    )
    with other.during("step 2"):
        other.publish()
        assert "rank 1: step 2 since" in mine.explain()


class _Frozen:
    """Store whose host no longer answers."""

    def __init__(self):
        self.thaw = threading.Event()
        self.asked = threading.Event()

    def set(self, key, value):
        self.asked.set()
        self.thaw.wait()

    check = get = multi_get = set


def test_frozen_store_does_not_block_ranks(monkeypatch):
    monkeypatch.setattr("lightning_ptdp.pipeline.watchdog._PUBLISH_LIMIT_S", 0.1)
    store = _Frozen()
    rank = watchdog(store)
    assert store.asked.wait(HANGS_S)
    assert not rank.publish()
    assert "rank 0 (or torchrun), which hosts the store" in rank.explain()
    assert "are unknown" in rank.explain()
    assert all(thread.daemon for thread in threads())
    rank.close()
    store.thaw.set()
    _join()


class _Gone:
    """Store whose host has died."""

    def __init__(self):
        self.calls = 0

    def set(self, *_):
        self.calls += 1
        raise dist.DistNetworkError("Broken pipe")

    check = get = multi_get = set


def test_lost_store_is_called_only_once():
    store = _Gone()
    rank = watchdog(store, interval_s=1e-3)
    for thread in threads():
        if thread.name == "ptdp status board":
            thread.join(HANGS_S)
    assert store.calls == 1
    assert not rank.publish()
    assert "has not answered" in rank.explain()
    rank.close()


# ---- threads -------------------------------------------------------------------------------------


def test_ranks_meet_only_if_all_come(opened):
    """A rank that comes after another one has given up gets the same answer."""
    store = HashStore()
    ranks = [opened(store, rank=rank, interval_s=1e4) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda rank: rank.all_arrive("both", limit_s=HANGS_S), ranks))
    assert not ranks[0].all_arrive("one", limit_s=0.05)
    assert not ranks[1].all_arrive("one", limit_s=HANGS_S)


def test_threads_end_with_watchdog():
    closed = watchdog(HashStore(), interval_s=1e4)
    assert len(threads()) == 2
    closed.close()
    closed.close()
    _join()
    forgotten = watchdog(HashStore(), interval_s=1e4, waits_raise=False)
    assert len(threads()) == 2
    del forgotten
    gc.collect()
    _join()


def _join():
    for thread in threads():
        thread.join(HANGS_S)
    assert not threads()


def test_forked_child_does_not_use_store():
    rank = watchdog(HashStore(), interval_s=1e4)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with rank.during("step 1"):
            said = rank.explain()
        rank.close()
        os.write(write, f"{rank.publish()} {'has not answered' in said}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"False True"
    assert rank.publish()
    rank.close()


class _Heard(HashStore):
    """Store that signals the third publication."""

    def __init__(self):
        super().__init__()
        self.times = 0
        self.thrice = threading.Event()

    def set(self, key, value):
        super().set(key, value)
        self.times += 1
        if self.times == 3:
            self.thrice.set()


def test_failed_rank_heard_before_is_marked_as_lived():
    store, told = HashStore(), LiveStatus()
    early, late = (StatusBoard(store, 0, (1,), 2, LiveStatus(), 1.0) for _ in range(2))
    store.set("lightning_ptdp/status/1", told.status().encode())
    early._listen()
    told.failure = "ValueError: x"
    store.set("lightning_ptdp/status/1", told.status().encode())
    for board in (early, late):
        board._listen()
    assert (early.heard[1].lived, late.heard[1].lived) == (True, False)


def test_watchdog_publishes_periodically(opened):
    store = _Heard()
    opened(store, interval_s=1e-3)
    assert store.thrice.wait(HANGS_S)


def test_stuck_action_is_reported_once_if_waits_do_not_raise(opened, capfd, monkeypatch):
    monkeypatch.setattr(HangJudge, "look", lambda *_: "")  # otherwise this process would end
    # Every action is stuck at once. The test looks, because the thread's interval is long.
    rank = opened(HashStore(), limit_s=1e-9, interval_s=1e4, waits_raise=False)
    quiet = opened(HashStore(), rank=1, limit_s=1e-9, interval_s=1e4)

    def said(of):
        assert of._look()
        return capfd.readouterr().err

    with rank.during("step 8"), quiet.during("step 8"):
        for each in (rank, quiet):
            each.started(Action.parse("F0.1"))
        words = (
            r"rank 0 is stuck: step 8, in F0\.1 since [\d.]+ s, limit 0\.0 s\.\nLast action of "
            r"each rank:\n"
        )
        assert re.match(words, said(rank))
        assert said(rank) == "" == said(quiet)
        rank.started(Action.parse("B0.1"))
        assert re.match("rank 0 is stuck: step 8, in B0.1 since", said(rank))
    with pytest.raises(ValueError):
        fail(rank, "step 9", "F0.1", ValueError("bad batch"))
    assert said(rank) == ""
