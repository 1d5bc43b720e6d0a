"""Gathers of sharded parameters in programs: complete, few, and refused if a chunk is missing."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings

from lightning_ptdp.schedule import (
    Action,
    ActionKind,
    Costs,
    ScheduleError,
    simulate,
    verify_schedule,
)
from lightning_ptdp.schedule.lowering import lower, with_gathers, without_gathers
from tests.schedule.builders import build, from_text
from tests.schedule.nccl import every
from tests.schedule.orders import compute_orders

pytestmark = pytest.mark.pure

SIZES = ((1, 3), (2, 4), (3, 7), (4, 8))


def most_whole(schedule):
    most = 0
    for program in schedule.programs:
        whole = 0
        for action in program:
            whole += (action.kind is ActionKind.GATHER) - (action.kind is ActionKind.FREE)
            most = max(most, whole)
    return most


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"])
def test_gathers_of_every_schedule_are_proven(name, chunks):
    for schedule in every(name, SIZES):
        gathered = with_gathers(schedule, chunks)
        verify_schedule(gathered, training=schedule.training)
        assert most_whole(gathered) == min(chunks, schedule.virtual_pipeline_size)
        assert without_gathers(gathered) == schedule


@given(compute_orders())
@settings(max_examples=60, deadline=None)
def test_gathers_of_custom_orders_are_proven(order):
    schedule = lower(order)
    for chunks in (1, 2):
        verify_schedule(with_gathers(schedule, chunks))


def gathers(program):
    return sum(action.kind is ActionKind.GATHER for action in program)


def test_two_whole_chunks_are_gathered_once_each_where_two_exist():
    schedule = build("interleaved_1f1b", p=2, v=2, m=8)
    once, often = with_gathers(schedule, 2), with_gathers(schedule, 1)
    assert [gathers(program) for program in once.programs] == [2, 2]
    # With one whole chunk, every switch between the chunks gathers.
    for program in often.programs:
        uses = [a.stage for a in program if a.kind in (ActionKind.FORWARD, ActionKind.BACKWARD)]
        switches = sum(a != b for a, b in itertools.pairwise(uses))
        assert gathers(program) == 1 + switches


def test_farthest_chunk_is_freed_and_next_one_gathered_during_computation():
    schedule = from_text("three", 1, 3, 1, "F0.0 F1.0 F2.0 B2.0 R2 B1.0 R1 B0.0 R0")
    assert with_gathers(schedule, 2).text() == (
        "rank 0  G0 G1 F0.0 D0 G2 F1.0 F2.0 B2.0 D2 R2 G0 B1.0 D1 R1 B0.0 D0 R0"
    )


def test_computation_waits_for_its_gather():
    schedule = with_gathers(from_text("two", 1, 2, 1, "F0.0 F1.0 B1.0 R1 B0.0 R0"), 2)
    slow, fast = (simulate(schedule, Costs(gather=time)).spans[0] for time in (5, 1))
    assert [span.end for span in slow] == [5 + 1, 5 + 5 + 1, 5 + 5 + 3, 5 + 5 + 5]
    assert [span.end for span in fast] == [1 + 1, 1 + 2, 1 + 4, 1 + 6]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("F0.0 B0.0 R0", "F0.0 needs G0 before it"),
        ("G0 F0.0 D0 B0.0 R0", "B0.0 needs G0 before it, without D0 between them"),
        ("G0 G0 F0.0 B0.0 D0 R0", "G0 gathers a stage that is whole"),
        ("G0 F0.0 B0.0 D0 D0 R0", "D0 frees a stage that is not whole"),
        ("G0 F0.0 B0.0 R0", "D0 is missing"),
    ],
)
def test_wrong_gathers_are_refused(program, reason):
    schedule = from_text("wrong", 1, 1, 1, program)
    if not schedule.gathers:  # a second rank gathers
        schedule = dataclasses.replace(
            schedule,
            pipeline_parallel_size=2,
            programs=(schedule.programs[0], (Action.parse("G1"), Action.parse("D1"))),
        )
    with pytest.raises(ScheduleError, match=reason):
        verify_schedule(schedule)
