"""Tests of the verifier on valid and damaged schedules, and against a slow oracle."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptdp.schedule import (
    SCHEDULES,
    Action,
    ActionKind,
    ScheduleError,
    peak_in_flight,
    verify_schedule,
)
from lightning_ptdp.schedule.lowering import lower
from tests.errors import raises_with
from tests.schedule.builders import build, from_text
from tests.schedule.nccl import Habits, operations
from tests.schedule.orders import compute_orders, needs
from tests.schedule.streams import stuck_operations

pytestmark = pytest.mark.thorough

K = ActionKind
SIZES = [
    ("gpipe", 2, 1, 3),
    ("gpipe", 3, 2, 4),
    ("1f1b", 1, 1, 3),
    ("1f1b", 2, 1, 3),
    ("1f1b", 4, 1, 6),
    ("interleaved_1f1b", 2, 2, 3),
    ("interleaved_1f1b", 3, 2, 4),
    ("interleaved_1f1b", 2, 3, 5),
    ("zb_h1", 3, 1, 4),
    ("zb_v", 2, 2, 3),
    ("zb_v", 3, 2, 6),
    ("dualpipe_v", 2, 2, 4),
    ("dualpipe_v", 3, 2, 2),
]


def changed(schedule, rank, program):
    programs = list(schedule.programs)
    programs[rank] = tuple(program)
    return dataclasses.replace(schedule, programs=tuple(programs))


def refuse(schedule, *words):
    """Check that the verifier refuses the training schedule and marks the fault."""
    with raises_with(("-->", *words), ScheduleError):
        verify_schedule(schedule, training=True)


def is_legal(schedule):
    """Return True if a permuted training schedule can run. This is the oracle.

    It tries every rank in turn. Sends block, in first-in first-out order. A receive waits until the
    previous message of its channel is sent."""
    kinds = {action.kind for program in schedule.programs for action in program}
    positions = [0] * schedule.pipeline_parallel_size
    done = set()
    posted = {}
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(schedule.programs):
            if positions[rank] == len(program):
                continue
            a = program[positions[rank]]
            s, i = a.stage, a.microbatch
            if a.kind in (K.SEND_FORWARD, K.SEND_BACKWARD):
                step = 1 if a.kind is K.SEND_FORWARD else -1
                queue = posted.get(schedule.channel(a), [])
                produced = Action(K.FORWARD if step == 1 else K.BACKWARD, s, i)
                able = bool(queue) and queue[0] == (s + step, i) and produced in done
                if able:
                    queue.pop(0)
            elif a.kind in (K.RECEIVE_FORWARD, K.RECEIVE_BACKWARD):
                computed = Action(K.FORWARD if a.kind is K.RECEIVE_FORWARD else K.BACKWARD, s, i)
                able = computed not in done and not posted.get(schedule.channel(a))
                if able:
                    posted.setdefault(schedule.channel(a), []).append((s, i))
            elif a.kind is K.REDUCE:
                last = K.WEIGHT if K.WEIGHT in kinds else K.BACKWARD
                able = all(Action(last, s, j) in done for j in range(schedule.num_microbatches))
            else:
                able = all(need in done for need in needed(schedule, a))
            if able:
                done.add(a)
                positions[rank] += 1
                moved = True
    return positions == [len(program) for program in schedule.programs]


def needed(schedule, action):
    """Return the computations that ``action`` needs, and the messages between ranks."""
    s, i = action.stage, action.microbatch
    found = needs(action, schedule.num_stages)
    for other in needs(action, schedule.num_stages):
        if schedule.rank_of(other.stage) != schedule.rank_of(s):
            forward = other.kind is K.FORWARD
            found.add(Action(K.SEND_FORWARD if forward else K.SEND_BACKWARD, other.stage, i))
            found.add(Action(K.RECEIVE_FORWARD if forward else K.RECEIVE_BACKWARD, s, i))
    return found


def accepted(schedule):
    try:
        verify_schedule(schedule, training=True)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize("size", SIZES)
def test_oracle_accepts_valid_schedules(size):
    schedule = build(*size)
    assert is_legal(schedule)
    assert verify_schedule(schedule) == tuple(
        peak_in_flight(program) for program in schedule.programs
    )


"""A schedule, a rank, and a position in its program."""


@st.composite
def places(draw):
    schedule = build(*draw(st.sampled_from(SIZES)))
    rank = draw(st.integers(0, schedule.pipeline_parallel_size - 1))
    return schedule, rank, draw(st.integers(0, len(schedule.programs[rank]) - 1))


@given(places())
@settings(max_examples=150, deadline=None)
def test_missing_action_is_rejected(place):
    schedule, rank, position = place
    program = list(schedule.programs[rank])
    del program[position]
    refuse(changed(schedule, rank, program))


@given(places(), st.data())
@settings(max_examples=150, deadline=None)
def test_repeated_action_is_rejected(place, data):
    schedule, rank, position = place
    program = list(schedule.programs[rank])
    program.insert(data.draw(st.integers(0, len(program))), program[position])
    refuse(changed(schedule, rank, program))


@given(places(), st.data())
@settings(max_examples=400, deadline=None)
def test_verifier_agrees_with_oracle_on_swapped_actions(place, data):
    schedule, rank, position = place
    program = list(schedule.programs[rank])
    # Swaps of close actions are the interesting ones: some of them are legal.
    other = min(max(position + data.draw(st.integers(-6, 6)), 0), len(program) - 1)
    program[position], program[other] = program[other], program[position]
    mutant = changed(schedule, rank, program)
    assert accepted(mutant) == is_legal(mutant)
    assert not (
        accepted(mutant) and any(stuck_operations(operations(mutant, Habits()), one_queue=True))
    )


@given(compute_orders(max_ranks=3, max_microbatches=3), st.data())
@settings(max_examples=150, deadline=None)
def test_verifier_agrees_with_oracle_on_swaps_in_random_orders(order, data):
    schedule = lower(order)
    assert is_legal(schedule)
    rank = data.draw(st.integers(0, schedule.pipeline_parallel_size - 1))
    program = list(schedule.programs[rank])
    at = data.draw(st.integers(0, len(program) - 2))
    program[at], program[at + 1] = program[at + 1], program[at]
    mutant = changed(schedule, rank, program)
    assert accepted(mutant) == is_legal(mutant)


USE = {K.RECEIVE_FORWARD: K.FORWARD, K.RECEIVE_BACKWARD: K.BACKWARD}
SENDS = (K.SEND_FORWARD, K.SEND_BACKWARD)


@given(places())
@settings(max_examples=150, deadline=None)
def test_action_too_late_or_too_early_is_rejected(place):
    """A receive after its use, a weight gradient before its backward, a reduction before the last
    gradient."""
    schedule, rank, position = place
    program = list(schedule.programs[rank])
    action = program.pop(position)
    if action.kind in USE:
        program.insert(
            program.index(Action(USE[action.kind], action.stage, action.microbatch)) + 1, action
        )
    elif action.kind is K.WEIGHT:
        program.insert(program.index(Action(K.BACKWARD, action.stage, action.microbatch)), action)
    elif action.kind is K.REDUCE:
        last = [
            i
            for i, other in enumerate(program)
            if other.kind in (K.BACKWARD, K.WEIGHT) and other.stage == action.stage
        ][-1]
        program.insert(last, action)
    else:
        return
    refuse(changed(schedule, rank, program))


@given(places(), st.data())
@settings(max_examples=150, deadline=None)
def test_reordered_sends_or_receives_are_rejected(place, data):
    schedule, rank, _ = place
    program = list(schedule.programs[rank])
    kinds = (*SENDS, *USE)
    queues = {}
    for position, action in enumerate(program):
        if action.kind in kinds:
            queues.setdefault((schedule.channel(action), action.kind), []).append(position)
    crowded = [queue for queue in queues.values() if len(queue) > 1]
    if not crowded:
        return
    queue = data.draw(st.sampled_from(crowded))
    first, second = data.draw(st.permutations(queue))[:2]
    program[first], program[second] = program[second], program[first]
    refuse(changed(schedule, rank, program))


@given(places(), st.data())
@settings(max_examples=100, deadline=None)
def test_action_on_wrong_rank_is_rejected(place, data):
    schedule, rank, position = place
    other = (rank + 1) % schedule.pipeline_parallel_size
    if other == rank:
        return
    here, there = list(schedule.programs[rank]), list(schedule.programs[other])
    there.insert(data.draw(st.integers(0, len(there))), here.pop(position))
    refuse(changed(changed(schedule, rank, here), other, there))


@given(
    st.sampled_from([name for name in SCHEDULES if name != "auto"]),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(0, 9),
)
@settings(max_examples=120, deadline=None)
def test_generators_pass_verification_at_any_size(name, p, v, m, extra):
    v = (
        1
        if p == 1 or name in ("1f1b", "zb_h1")
        else 2
        if name in ("zb_v", "dualpipe_v")
        else max(v, 1 + name.startswith("inter"))
    )
    group_size = p + extra if name == "interleaved_1f1b" else None
    schedule = build(name, p, v, m, group_size=group_size)
    peaks = verify_schedule(schedule, training=True)
    assert peaks == tuple(map(peak_in_flight, schedule.programs))
    assert all(1 <= peak <= v * m for peak in peaks)


GOOD = ("F0.0 RB0.0 SF0.0 B0.0 R0", "RF1.0 F1.0 B1.0 SB1.0 R1")


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (GOOD[0], "F1.0 RF1.0 B1.0 SB1.0 R1", "F1.0 needs RF1.0 before it"),
        ("F0.0 RB0.0 SF0.0 R0 B0.0", GOOD[1], "B0.0 comes after R0"),
        ("F0.0 RB0.0 SF0.0 B0.0", GOOD[1], "R0 is missing"),
        ("F0.0 SF0.0 B0.0 R0", GOOD[1], "B0.0 needs RB0.0"),
        ("F0.0 RB0.0 B0.0 R0", GOOD[1], "SF0.0 is missing"),
        (f"F0.0 {GOOD[0]}", GOOD[1], "F0.0 happens twice"),
        (
            "F0.0 F1.0 RB0.0 SF0.0 B0.0 R0",
            GOOD[1],
            "F1.0 is on rank 0, but stage 1 is on rank 1",
        ),
        (f"RF0.0 {GOOD[0]}", GOOD[1], "RF0.0 has no peer"),
        (GOOD[0], "RF1.0 F1.0 SF1.0 B1.0 SB1.0 R1", "SF1.0 has no peer"),
        ("F0.1 RB0.0 SF0.0 B0.0 R0", GOOD[1], "F0.1 does not exist"),
        (
            "F0.0 F2.0 RB0.0 SF0.0 B0.0 R0",
            GOOD[1],
            "F2.0 does not exist: stages are 0 to 1",
        ),
        ("F0.0 W0.0 RB0.0 SF0.0 B0.0 R0", GOOD[1], "W0.0 needs B0.0"),
        ("F0.0 RB0.0 SF0.0 B0.0 W0.0 R0", GOOD[1], "W1.0 is missing"),
        (f"{GOOD[0]} W0.0", "RF1.0 F1.0 B1.0 SB1.0 W1.0 R1", "W0.0 comes after R0"),
        ("F0.0 SF0.0", "RF1.0 F1.0", "B0.0 is missing"),
    ],
)
def test_error_names_each_fault(first, second, words):
    verify_schedule(from_text("hand", 2, 1, 1, *GOOD), training=True)
    refuse(from_text("hand", 2, 1, 1, first, second), words)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        # sends and receives in different orders
        (
            ("F0.0 F0.1 SF0.1 SF0.0", "RF1.0 RF1.1 F1.0 F1.1"),
            [
                "rank 0 sends SF0.1 where rank 1 receives RF1.0 (forward)",
                "F0.1 --> SF0.1",
                "--> RF1.0",
            ],
        ),
        # both ranks send before either posts its receive
        (
            (
                "F0.0 SF0.0 F0.1 SF0.1 RB0.0 B0.0 RB0.1 B0.1 R0",
                "RF1.0 F1.0 B1.0 SB1.0 RF1.1 F1.1 B1.1 SB1.1 R1",
            ),
            ["deadlock", "rank 0 at SF0.1, rank 1 at SB1.0", "F0.1 --> SF0.1", "B1.0 --> SB1.0"],
        ),
    ],
)
def test_fault_between_two_ranks_is_marked_on_both(lines, words):
    with raises_with(words, ScheduleError):
        verify_schedule(from_text("hand", 2, 1, 2, *lines))


def test_receives_posted_just_before_use_can_deadlock():
    schedule = build("interleaved_1f1b", 2, 2, 4)
    programs = []
    for program in schedule.programs:
        late = []
        for action in program:
            if action.kind in USE.values():
                late += [
                    other
                    for other in program
                    if other.kind in USE
                    and dataclasses.replace(other, kind=USE[other.kind]) == action
                ]
            if action.kind not in USE:
                late.append(action)
        programs.append(tuple(late))
    with pytest.raises(ScheduleError, match="deadlock"):
        verify_schedule(dataclasses.replace(schedule, programs=tuple(programs)))


def test_split_backward_holds_activations_until_weight_gradient():
    lines = (
        "F0.0 RB0.0 SF0.0 F0.1 RB0.1 SF0.1 B0.0 B0.1 W0.0 W0.1 R0",
        "RF1.0 RF1.1 F1.0 B1.0 SB1.0 F1.1 B1.1 SB1.1 W1.0 W1.1 R1",
    )
    assert verify_schedule(from_text("split", 2, 1, 2, *lines)) == (2, 2)


def test_stages_on_single_rank_need_no_messages():
    one = from_text("one", 1, 2, 1, "F0.0 F1.0 B1.0 R1 B0.0 R0")
    assert verify_schedule(one, training=True) == (2,)
    with pytest.raises(ScheduleError, match=r"F1\.0 needs F0\.0"):
        verify_schedule(from_text("one", 1, 2, 1, "F1.0 F0.0 B1.0 R1 B0.0 R0"))


def test_backward_in_evaluation_or_missing_program_is_refused():
    with pytest.raises(ScheduleError, match="not for training"):
        verify_schedule(build("1f1b", 2, 1, 2), training=False)
    with pytest.raises(ScheduleError, match="one per rank"):
        verify_schedule(from_text("short", 2, 1, 1, "F0.0"))


def test_error_shows_long_programs_only_near_fault():
    schedule = build("1f1b", 4, 1, 40)
    program = list(schedule.programs[2])
    del program[60]
    with pytest.raises(ScheduleError) as error:
        verify_schedule(changed(schedule, 2, program))
    lines = str(error.value).splitlines()
    assert len(lines) == 5
    assert all(len(line.split()) < 35 for line in lines[1:])
