"""The bubbles of the papers, exactly; and costs that differ."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest

from lightning_ptdp.pipeline import Action, Costs, Schedule, ScheduleError, Timeline, build_schedule, peak_in_flight, simulate


def build(name: str, p: int, v: int, m: int, training: bool = True) -> Schedule:
    return build_schedule(name, pipeline_parallel_size=p, virtual_pipeline_size=v, num_microbatches=m, training=training)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_without_interleaving(name: str) -> None:
    for p in range(2, 9):
        for m in range(1, 18):
            timeline = simulate(build(name, p, 1, m))
            assert timeline.bubble_fraction == Fraction(p - 1, m)
            assert timeline.step_time == 3 * (m + p - 1)


@pytest.mark.parametrize("name", ["gpipe", "interleaved_1f1b"])
def test_bubble_with_interleaving(name: str) -> None:
    # The paper's formula, which it states for p dividing m, holds here for every m >= p.
    for p in range(2, 7):
        for v in range(2, 4):
            for m in range(p, 14):
                timeline = simulate(build(name, p, v, m))
                assert timeline.bubble_fraction == Fraction(p - 1, v * m)
                assert timeline.step_time == 3 * (v * m + p - 1)


def test_interleaving_helps_with_fewer_microbatches_than_ranks_too() -> None:
    for p in range(3, 7):
        for m in range(2, p):
            interleaved = simulate(build("interleaved_1f1b", p, 2, m), Costs(forward=Fraction(1, 2), backward=1))
            assert interleaved.step_time < simulate(build("1f1b", p, 1, m)).step_time


def test_no_bubble_without_a_pipeline() -> None:
    timeline = simulate(build("1f1b", 1, 1, 5))
    assert timeline.bubble_fraction == timeline.idle_fraction == 0
    assert timeline.peak_in_flight == (1,)


def test_idle_fraction_is_a_part_of_the_step() -> None:
    timeline = simulate(build("1f1b", 4, 1, 8))
    assert timeline.idle_fraction == pytest.approx(3 / 11)
    assert timeline.busy == (24, 24, 24, 24)


def test_evaluation_bubble() -> None:
    for m in range(4, 14):
        timeline = simulate(build("auto", 4, 2, m, training=False))
        assert timeline.bubble_fraction == Fraction(3, 2 * m)


def test_peaks_are_those_of_the_programs() -> None:
    for name, v in (("gpipe", 2), ("1f1b", 1), ("interleaved_1f1b", 3)):
        schedule = build(name, 4, v, 10)
        assert simulate(schedule).peak_in_flight == tuple(peak_in_flight(program) for program in schedule.programs)


def test_spans_respect_every_dependency_and_the_latency() -> None:
    latency = Fraction(1, 3)
    schedule = build("interleaved_1f1b", 3, 2, 7)
    timeline = simulate(schedule, Costs(forward=[1, 2, 1, 3, 1, 2], backward=[2, 3, 2, 4, 2, 3], latency=latency))
    ends = {str(span.action): span.end for spans in timeline.spans for span in spans}
    starts = {str(span.action): span.start for spans in timeline.spans for span in spans}
    for microbatch in range(7):
        for stage in range(1, 6):
            assert starts[f"F{stage}.{microbatch}"] >= ends[f"F{stage - 1}.{microbatch}"] + latency
            assert starts[f"B{stage - 1}.{microbatch}"] >= ends[f"B{stage}.{microbatch}"] + latency
        assert starts[f"B5.{microbatch}"] >= ends[f"F5.{microbatch}"]
    for spans in timeline.spans:
        assert all(before.end <= after.start for before, after in pairwise(spans))


def test_one_slow_stage_sets_the_pace() -> None:
    timeline = simulate(build("1f1b", 2, 1, 50), Costs(forward=[1, 2], backward=[1, 2]))
    assert timeline.busy == (100, 200)
    assert timeline.step_time == 1 + 200 + 1


def test_latency_of_one_microbatch_is_paid_at_every_boundary() -> None:
    assert simulate(build("1f1b", 4, 1, 1), Costs(latency=5)).step_time == 4 * 3 + 6 * 5


def test_a_schedule_that_hangs_is_said_to() -> None:
    lines = ("RB0.0 B0.0 F0.0 SF0.0", "RF1.0 F1.0 B1.0 SB1.0")
    programs = tuple(tuple(Action.parse(word) for word in line.split()) for line in lines)
    with pytest.raises(ScheduleError, match=r"rank 0 waits for SB1\.0"):
        simulate(Schedule("hangs", 2, 1, 1, programs))


def test_costs_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"forward has 3 costs for 4 stages"):
        simulate(build("1f1b", 4, 1, 2), Costs(forward=[1, 2, 3]))
    with pytest.raises(ValueError, match="latency=-1"):
        Costs(latency=-1)
    with pytest.raises(ValueError, match="backward"):
        Costs(backward=[1, float("nan")])


def test_text_draws_long_actions_over_several_columns() -> None:
    drawn = simulate(build("1f1b", 2, 1, 2)).text()
    assert drawn.splitlines() == [
        "rank 0  F0.0 F0.1           B0.0 ====      B0.1 ====",
        "rank 1       F1.0 B1.0 ==== F1.1 B1.1 ====",
    ]


def test_an_empty_timeline_has_no_time() -> None:
    timeline = Timeline(Schedule("empty", 1, 1, 1, ((),)), ((),))
    assert timeline.step_time == timeline.bubble_fraction == 0
    assert timeline.text() == "rank 0"
