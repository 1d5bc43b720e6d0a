"""Tests of the hang guard: its rules on simulated observations, then real processes on a backend
whose waits return at once, as with NCCL."""

import os
import pickle
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_ptdp.pipeline.hang_guard import (
    GuardObservation,
    HangGuard,
    HangJudge,
    keep_flight_record,
)
from lightning_ptdp.pipeline.rank_status import LOST, Heard, LiveStatus
from tests.pipeline.lost_ranks import train, work
from tests.pipeline.two_processes import HANGS_S, two_processes

pytestmark = pytest.mark.thorough

LIMIT_S, STEP_S = 100.0, 1.0


AT_FIRST = LiveStatus().status()


def status(**known):
    return replace(AT_FIRST, **known)


class Scene:
    """Simulation of two ranks, one of which is judged every second.

    Args:
        at: Returns the changes to the observation at a second.
        waits_raise, limit_s: Arguments of the judge.
    """

    def __init__(
        self,
        at: Callable[[float], dict[str, Any]],
        *,
        waits_raise: bool = False,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._at, self._judge = (
            at,
            HangJudge(limit_s=limit_s, interval_s=STEP_S, waits_raise=waits_raise),
        )

    def ends_after(self, most=1000):
        """Return the second at which the rank is ended and the reason, or None if it is not."""
        for second in range(most):
            known = {
                "note": "F0.1",
                "watched": True,
                "heard": {1: alive(second)},
                "answered_at": second,
            }
            if why := self._judge.look(
                GuardObservation(**{"now": float(second), **known, **self._at(second)})
            ):
                return second, why
        return None


def alive(second):
    return Heard(status(beat=int(second)), second, True)


def fails_at(when):
    def at(second):
        return {
            "heard": {
                1: Heard(
                    status(beat=int(second), failure="ValueError: x" * (second >= when)),
                    second,
                    True,
                )
            }
        }

    return at


def silent_from(when):
    return lambda second: {"heard": {1: alive(min(second, when))}}


def nobody_answers_from(when):
    def at(second):
        return {
            "heard": {1: alive(min(second, when))},
            "answered_at": min(second, when),
            "unanswered_s": max(second - when, 0),
        }

    return at


def in_one_call(second):
    return {"pulse": 7}


def computing(second):
    return {"pulse": int(second)}


@pytest.mark.parametrize(
    ("at", "on_nccl", "with_gloo"),
    [
        (
            fails_at(50),
            (61, "rank 1 failed (ValueError: x)"),
            (121, "rank 1 failed (ValueError: x)"),
        ),
        (
            silent_from(20),
            (121, "rank 1 has not reported for 101 s"),
            (121, "rank 1 has not reported for 101 s"),
        ),
        (
            nobody_answers_from(20),
            (121, "rank 0 (or torchrun), which hosts the store, has not reported for 101 s"),
            (121, "rank 0 (or torchrun), which hosts the store, has not reported for 101 s"),
        ),
        (in_one_call, (111, "it has been in one call for 111 s"), None),
        (computing, None, None),
        (
            lambda second: {"failed": second > 10},
            (112, "it failed, but does not end"),
            None,
        ),
    ],
    ids=[
        "another rank failed",
        "another rank is silent",
        "the store is silent",
        "one call",
        "Python that runs",
        "its own end",
    ],
)
def test_hang_conditions_with_nccl_and_gloo(at, on_nccl, with_gloo):
    assert Scene(at).ends_after() == on_nccl
    assert Scene(at, waits_raise=True).ends_after() == with_gloo


@pytest.mark.parametrize(
    ("limit_s", "failed_at", "ends_at"),
    [(10.0, 2, 8), (10.0, 9, 12), (100.0, 105, 111), (1000.0, 1, 12), (1000.0, 0, 11)],
)
def test_failure_of_other_rank_is_reported_first(limit_s, failed_at, ends_at):
    """The failure is reported after 10 s or half of the limit, even if this rank is in one call."""
    fails = fails_at(failed_at)
    ended = Scene(
        lambda second: {**fails(second), **in_one_call(second)}, limit_s=limit_s
    ).ends_after()
    assert ended == (ends_at, "rank 1 failed (ValueError: x)")


@pytest.mark.parametrize(
    ("silent", "why"),
    [(40, "rank 1 has not reported for 71 s"), (80, "it has been in one call for 111 s")],
)
def test_silent_rank_is_named_after_half_of_limit(silent, why):
    falls_silent = silent_from(silent)
    assert Scene(lambda second: {**falls_silent(second), **in_one_call(second)}).ends_after() == (
        111,
        why,
    )


def test_rank_ended_by_lost_peer_is_not_named_as_cause():
    def gives_up(second):
        return {
            **in_one_call(second),
            "heard": {
                1: Heard(status(beat=int(second), failure=LOST * (second >= 108)), second, True)
            },
        }

    assert Scene(gives_up).ends_after() == (111, "it has been in one call for 111 s")


def getting_on(at):
    return lambda second: {**at(second), "note": second // 9}


def between_steps(at):
    return lambda second: {**at(second), "watched": False}


@pytest.mark.parametrize(
    "at", [fails_at(50), silent_from(20), nobody_answers_from(20), in_one_call]
)
def test_progressing_rank_is_not_ended(at):
    assert Scene(getting_on(at)).ends_after() is None
    assert Scene(getting_on(at), waits_raise=True).ends_after() is None


@pytest.mark.parametrize("at", [in_one_call, nobody_answers_from(20)])
def test_user_code_between_steps_has_no_limit(at):
    assert Scene(between_steps(at)).ends_after() is None


@pytest.mark.parametrize(("at", "when"), [(fails_at(50), 151), (silent_from(20), 121)])
def test_lost_rank_ends_user_code_between_steps(at, when):
    ended = Scene(between_steps(at)).ends_after()
    assert ended[0] == when
    assert Scene(between_steps(at), waits_raise=True).ends_after() is None


def test_finished_rank_is_not_reported_as_silent():
    ended = Heard(status(ended=True), 20.0, True)
    assert (
        Scene(lambda second: {"heard": {1: alive(second) if second < 20 else ended}}).ends_after()
        is None
    )


def test_failure_of_earlier_training_is_ignored():
    old = Heard(status(failure="ValueError: x", ended=True), 0.0, False)
    assert Scene(lambda _: {"heard": {1: old}}).ends_after() is None


def test_time_while_process_is_stopped_is_not_counted():
    pause = {"now": lambda second: second + (10 * LIMIT_S if second > 50 else 0)}

    def at(second):
        now = pause["now"](second)
        return {
            "now": now,
            "note": second // 60,
            "answered_at": now,
            "heard": {1: Heard(alive(second).status, now, True)},
        }

    assert Scene(at).ends_after() is None


# ---- real processes ------------------------------------------------------------------------------


def _writes(rank, _, folder, part, *arguments):
    """Run ``part`` with its output and its temporary files in the folder."""
    tempfile.tempdir = folder
    with open(Path(folder, f"said-{rank}.txt"), "wb", buffering=0) as stream:
        os.dup2(stream.fileno(), sys.stderr.fileno())
    part(rank, *arguments, folder)


def _ends(folder, who, part, *arguments):
    """Run ``part`` on two ranks; return the exit code and the output of rank ``who``."""
    with two_processes(_writes, str(folder), part, *arguments, backend="queued") as (ranks, _):
        ranks[who].join(HANGS_S)
        return ranks[who].exitcode, (folder / f"said-{who}.txt").read_text()


@pytest.mark.parametrize(
    ("victim", "how", "why"),
    [
        (1, "stop", r"rank 1 has not reported for [\d.]+ s"),
        (
            0,
            "stop",
            r"rank 0 \(or torchrun\), which hosts the store, has not reported for [\d.]+ s",
        ),
        (1, "kill", r"rank 1 has not reported for [\d.]+ s"),
        (1, "raise", r"rank 1 failed \(ValueError: a bad batch\)"),
        (1, "wait", r"it has been in one call for [\d.]+ s"),
    ],
)
def test_hung_rank_ends_and_reports_reason(victim, how, why, tmp_path):
    survivor = 1 - victim
    code, said = _ends(tmp_path, survivor, train, victim, how)
    assert code == 1, said
    place = rf"step 1, in [FB]{survivor}\.\d with rank {victim}"
    assert re.search(
        rf"rank {survivor} \(.*\) is stuck: {place} since [\d.]+ s, limit 4\.0 s: {why}\.", said
    ), said
    assert re.search(
        rf"Last action of each rank:\n(.*\n)?  rank {survivor}: {place} since [\d.]+ s \(this "
        r"rank\)",
        said,
    ), said
    assert re.search(rf"  rank {victim}: \S", said), said
    assert re.search(r"This rank is at \w+\.py, line \d+\. Its process ends now\.", said), said
    (record,) = re.findall(
        r"by torch's flight recorder \(torchfrtrace reads the file\): (\S+)\n", said
    )[-1:]
    assert pickle.loads(Path(record).read_bytes())["version"]
    if how in ("stop", "kill"):
        assert re.search(rf"No answer from rank {victim}, for [\d.]+ s: \S", said), said


def test_long_user_code_is_not_a_hang(tmp_path):
    code, said = _ends(tmp_path, 0, work)
    assert (code, (tmp_path / "0.txt").exists()) == (0, True), said


def test_flight_record_is_not_written_through_a_link(tmp_path, monkeypatch):
    """Another user may own the folder in a shared /tmp, and prepare links in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"ptdp-flight-recorder-{os.getuid()}"
    folder.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (folder / f".rank_0.{os.getpid()}").symlink_to(victim)
    assert keep_flight_record(0) == ""
    assert victim.read_text() == "kept"
    assert pickle.loads(Path(keep_flight_record(1)).read_bytes())["version"]


def test_closing_guard_ends_its_thread():
    before, looked = threading.enumerate(), threading.Event()
    guard = HangGuard(lambda: not looked.set(), interval_s=0.001)
    looked.wait()
    guard.close()
    assert [thread for thread in threading.enumerate() if thread not in before] == []
