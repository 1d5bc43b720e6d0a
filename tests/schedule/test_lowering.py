"""Tests of lowering, which adds communication to a program.

Receives are posted just in time, in the order of the sends, and without deadlock.
"""

import dataclasses
import time

import pytest
from hypothesis import given, settings

from lightning_ptdp.schedule import (
    Action,
    ActionKind,
    ScheduleError,
    verify_schedule,
)
from lightning_ptdp.schedule.lowering import compute_order, lower
from tests.schedule.builders import build, from_text
from tests.schedule.orders import compute_orders

pytestmark = pytest.mark.thorough

RECEIVES = {
    ActionKind.RECEIVE_FORWARD: ActionKind.FORWARD,
    ActionKind.RECEIVE_BACKWARD: ActionKind.BACKWARD,
}
SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT)
BOUNDED = (("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("zb_v", 2), ("dualpipe_v", 2))
"""Schedules, with their number of chunks, that keep a bounded number of receives open."""


def order_of(text, p, v, m):
    return from_text("by hand", p, v, m, *text.splitlines())


def most_open(program):
    """Return the largest number of receives that are posted and not yet used."""
    open_now = set()
    most = 0
    for action in program:
        if action.kind in RECEIVES:
            open_now.add(Action(RECEIVES[action.kind], action.stage, action.microbatch))
        open_now.discard(action)
        most = max(most, len(open_now))
    return most


@given(compute_orders())
@settings(max_examples=150, deadline=None)
def test_executable_order_is_lowered_without_deadlock(order):
    schedule = lower(order)
    verify_schedule(schedule, training=True)
    assert compute_order(schedule) == order
    for program in schedule.programs:
        computations = [action for action in program if action.kind in COMPUTE]
        done = []
        for action in program:
            if action.kind in COMPUTE:
                done.append(action)
            elif action.kind in RECEIVES:
                assert len(done) <= computations.index(
                    Action(RECEIVES[action.kind], action.stage, action.microbatch)
                )
                if action.kind is ActionKind.RECEIVE_BACKWARD:
                    # The gradient has the shape of the forward's output.
                    assert Action(ActionKind.FORWARD, action.stage, action.microbatch) in done


def test_forward_receives_are_posted_one_computation_ahead():
    for name, v in (*BOUNDED, ("interleaved_1f1b", 2)):
        for program in build(name, 4, v, 16).programs:
            computations = [action for action in program if action.kind in COMPUTE]
            done = 0
            for action in program:
                done += action.kind in COMPUTE
                if action.kind is ActionKind.RECEIVE_FORWARD:
                    needed_at = computations.index(
                        Action(ActionKind.FORWARD, action.stage, action.microbatch)
                    )
                    assert done <= max(needed_at - 1, 0), (name, str(action))


@pytest.mark.parametrize(
    ("text", "lowered"),
    [
        # The gradient of microbatch 0 and the hidden state of 1 cross, so both ranks must post
        # their receives before either sends.
        (
            "F0.0 F0.1 B0.0 B0.1\nF1.0 B1.0 F1.1 B1.1",
            "F0.0 SF0.0 RB0.0 F0.1 SF0.1 RB0.1 B0.0 B0.1 R0\nRF1.0 F1.0 RF1.1 B1.0 SB1.0 F1.1 "
            "B1.1 SB1.1 R1",
        ),
        # Sent in order 0, 1 but needed in order 1, 0: the receive of 0 is still posted first.
        ("F0.0 F0.1 B0.0 B0.1\nF1.1 B1.1 F1.0 B1.0", None),
        # Split backward: the reduction follows the last weight gradient.
        (
            "F0.0 B0.0 W0.0\nF1.0 B1.0 W1.0",
            "F0.0 SF0.0 RB0.0 B0.0 W0.0 R0\nRF1.0 F1.0 B1.0 SB1.0 W1.0 R1",
        ),
        # Rank 1 uses the microbatches in reverse order, but does not block rank 0.
        ("F0.0 F0.1 F0.2 B0.0 B0.1 B0.2\nF1.2 F1.1 F1.0 B1.2 B1.1 B1.0", None),
    ],
)
def test_receives_are_posted_in_send_order(text, lowered):
    m = 1 + max(int(word[-1]) for word in text.split())
    schedule = lower(order_of(text, 2, 1, m))
    verify_schedule(schedule, training=True)
    if lowered is not None:
        assert schedule.programs == order_of(lowered, 2, 1, m).programs
    received = [
        action.microbatch
        for action in schedule.programs[1]
        if action.kind is ActionKind.RECEIVE_FORWARD
    ]
    assert received == list(range(m))


@pytest.mark.parametrize(("name", "v"), BOUNDED)
def test_open_receives_are_bounded_at_any_size(name, v):
    for p, m in ((2, 4), (4, 8), (4, 64), (4, 65), (8, 40), (16, 50)):
        for training in (True, False):
            assert max(map(most_open, build(name, p, v, m, training).programs)) <= 4


def test_open_receives_of_interleaved_schedules_are_bounded():
    for p, v, m in (
        (2, 2, 8),
        (4, 2, 8),
        (4, 2, 7),
        (4, 4, 64),
        (4, 3, 67),
        (8, 2, 100),
        (16, 2, 64),
    ):
        largest = -(-m // max(m // p, 1))
        for name in ("gpipe", "interleaved_1f1b"):
            # Groups of p: half a group arrives early. A group of p + k makes k more arrive early.
            assert max(map(most_open, build(name, p, v, m).programs)) <= p // 2 + 3 + 2 * (
                largest - p
            )
        assert (
            max(map(most_open, build("auto", p, v, m, training=False).programs)) <= 2 + largest - p
        )


def test_reduction_follows_last_gradient_directly():
    for name, v in (("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2)):
        for program in build(name, 4, v, 8).programs:
            last = ActionKind.WEIGHT if name.startswith("zb") else ActionKind.BACKWARD
            for position, action in enumerate(program):
                if action.kind is ActionKind.REDUCE:
                    before = [other for other in program[:position] if other.kind in COMPUTE][-1]
                    assert (before.kind, before.stage, before.microbatch) == (last, action.stage, 7)


def test_adjacent_stages_on_one_rank_send_no_messages():
    for schedule in (build("zb_v", 4, 2, 4), build("dualpipe_v", 4, 2, 4)):
        for action in schedule.programs[3]:
            assert action.kind is not ActionKind.SEND_FORWARD or action.stage == 4
            assert action.kind is not ActionKind.RECEIVE_FORWARD or action.stage == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("F0.0 B0.0\nB1.0 F1.0", "B1.0 needs F1.0 before it"),
        ("B0.0 F0.0\nF1.0 B1.0", "B0.0 needs F0.0 before it"),
        ("F0.0 B0.1 F0.1 B0.0\nF1.0 B1.0 F1.1 B1.1", "B0.1 needs F0.1 before it"),
        ("F0.0 B0.0\nF1.0 B1.0 R1", "R1 is not a computation"),
        ("F0.0 F0.0 B0.0\nF1.0 B1.0", "F0.0 happens twice"),
        ("F0.0 F1.0\nB1.0", "F1.0 is on rank 0, but stage 1 is on rank 1"),
        ("F0.0 F2.0\nB1.0", "F2.0 does not exist: stages are 0 to 1"),
        ("F0.0 F0.2\nB1.0", "F0.2 does not exist"),
        ("F0.0", "one per rank"),
        (
            "F0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.0 B1.1",
            "rank 0 at B0.0 waits for B1.0, rank 1 at F1.1 waits for F0.1",
        ),
    ],
)
def test_invalid_order_is_refused(text, words):
    with pytest.raises(ScheduleError) as error:
        lower(order_of(text, 2, 1, 2))
    assert words in str(error.value) and words in error.value.reason
    assert "-->" in str(error.value) or "one per rank" in words


def test_programs_of_other_placement_are_refused():
    loop = build("interleaved_1f1b", 2, 2, 2)
    assert any(action.kind in SENDS and action.stage == 1 for action in loop.programs[1])
    with pytest.raises(ScheduleError, match="is on rank"):
        verify_schedule(dataclasses.replace(loop, placement="v"))
    with pytest.raises(ScheduleError, match="is on rank"):
        lower(dataclasses.replace(compute_order(loop), placement="v"))


def test_build_time_grows_linearly_with_actions():
    """Every rank builds the whole schedule, which may have millions of actions."""

    def seconds(m):
        order = compute_order(build("interleaved_1f1b", 16, 4, m))
        started = time.process_time()
        verify_schedule(lower(order))
        return time.process_time() - started

    assert min(seconds(256) for _ in range(2)) < 24 * min(seconds(32) for _ in range(3))
