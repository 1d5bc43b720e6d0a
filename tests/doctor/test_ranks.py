"""Tests with real processes, some of which hang, fail or die."""

import os
import re
import threading

import psutil
import pytest
import torch
import torch.distributed as dist

from lightning_ptdp.base.forked_processes import run_ranks
from lightning_ptdp.doctor import Status
from lightning_ptdp.doctor.links import GroupMember, measure
from lightning_ptdp.doctor.ranks import COLLECTIVES, check_ranks


def meet_without(rank, tell, absent, how):
    tell("the start")
    if rank == absent:
        if how == "dies":
            os._exit(3)
        if how == "raises":
            error = ValueError("no\nmore")
            error.add_note("in a step")
            raise error
        threading.Event().wait()
    tell("the meeting")
    if how != "alone":
        threading.Event().wait()
    return rank


@pytest.mark.parametrize(
    ("how", "explained"),
    [
        (
            "hangs",
            "rank 1 hangs in the start; rank 0 is waiting in the meeting; rank 2 is waiting in the meeting",
        ),
        ("dies", "rank 1 failed in the start: the process ended with exit code 3"),
        ("raises", "rank 1 failed in the start: ValueError: no"),
    ],
)
def test_failing_or_hanging_rank_is_named(how, explained, monkeypatch):
    monkeypatch.setattr("lightning_ptdp.base.forked_processes._ENDING_S", 0.5)
    before = set(psutil.Process().children())
    outcome = run_ranks(lambda rank, tell: meet_without(rank, tell, 1, how), count=3, timeout_s=1.5)
    assert outcome.explain() == explained
    assert set(psutil.Process().children()) <= before, "a process is left behind"


def test_successful_ranks_return_results():
    outcome = run_ranks(
        lambda rank, tell: meet_without(rank, tell, -1, "alone"), count=2, timeout_s=60
    )
    assert (outcome.results, outcome.explain()) == ({0: 0, 1: 1}, "")


def use_all(rank, size):
    place = GroupMember(rank=rank, size=size, device=torch.device("cpu"))
    said = []
    measured = measure(place, said.append, sizes=(4096,))
    assert all(one.seconds > 0 for one in measured)
    return [use(place) for use in COLLECTIVES.values()], said


def test_collectives_are_correct_on_three_ranks(pool):
    for right, said in pool.run(use_all, world_size=3, args=(3,)):
        assert all(right)
        assert [what.partition(" of ")[0] for what in said] == [
            "send 0 to 1",
            "send 1 to 2",
            "send 2 to 0",
            "all-reduce",
            "reduce-scatter",
            "all-gather",
        ]


def spoiled(rank):
    """Return the collectives that detect all-reduce sums too large by ``rank``."""
    real = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        real(tensor, *args, **kwargs)
        tensor += rank

    dist.all_reduce = all_reduce
    try:
        place = GroupMember(rank=rank, size=2, device=torch.device("cpu"))
        return [name for name, use in COLLECTIVES.items() if not use(place)]
    finally:
        dist.all_reduce = real


def test_wrong_sum_is_detected_on_its_rank(pool):
    assert pool.run(spoiled, world_size=2) == [[], ["all-reduce", "groups"]]


def test_single_process_passes_and_unusable_backend_fails():
    alone = check_ranks(count=1, backend="gloo", timeout_s=60)
    assert {check.status for check in alone.checks} == {Status.OK}
    assert not alone.measurements
    if not torch.cuda.is_available():
        (check,) = check_ranks(count=2, backend="nccl", timeout_s=30).checks
        assert check.status is Status.FAILED
        assert re.match("rank [01] failed in its start", check.found), check  # the first to fail
