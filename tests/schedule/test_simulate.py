"""Simulated timelines: the exact bubbles of the papers, and unequal costs."""

import itertools
from fractions import Fraction
from itertools import pairwise

import pytest

from lightning_ptdp.schedule import (
    Costs,
    Schedule,
    ScheduleError,
    Timeline,
    ideal_bubble,
    peak_in_flight,
    simulate,
)
from tests.schedule.builders import UNIT, build, from_text, simulated

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("names", "sizes", "chunks"),
    [
        (("gpipe", "1f1b"), [(p, m) for p in range(2, 9) for m in range(1, 18)], (1,)),
        # The paper states this formula for p dividing m. Here it holds for every m >= p.
        (
            ("gpipe", "interleaved_1f1b"),
            [(p, m) for p in range(2, 7) for m in range(p, 14)],
            (2, 3),
        ),
    ],
    ids=["one chunk", "several chunks"],
)
def test_bubble_matches_paper(names, sizes, chunks):
    for name, (p, m), v in itertools.product(names, sizes, chunks):
        timeline = simulated(name, p, v, m)
        assert timeline.bubble_fraction == Fraction(p - 1, v * m)
        assert timeline.step_time == 3 * (v * m + p - 1)


def own_time(timeline):
    """Return each rank's time from its first action to its last."""
    return tuple(spans[-1].end - spans[0].start for spans in timeline.spans)


def test_1f1b_ranks_start_late_and_end_early():
    # Rank r starts r forwards late and ends r backwards early.
    timeline = simulated("1f1b", 4, 1, 8)
    assert own_time(timeline) == (33, 30, 27, 24)


def test_interleaving_is_faster_with_fewer_microbatches_than_ranks():
    for p in range(3, 7):
        for m in range(2, p):
            interleaved = simulated("interleaved_1f1b", p, 2, m, forward=Fraction(1, 2), backward=1)
            assert interleaved.step_time < simulated("1f1b", p, 1, m).step_time


def test_single_rank_has_no_bubble():
    timeline = simulated("1f1b", 1, 1, 5)
    assert timeline.bubble_fraction == 0
    assert timeline.peak_in_flight == (1,)


def test_ideal_bubble_matches_papers():
    assert ideal_bubble(build("1f1b", 4, 1, 8)) == 3 / 8  # (p - 1) / m
    # (p - 1) / (v m), which the quick start shows
    assert ideal_bubble(build("interleaved_1f1b", 2, 2, 4)) == 1 / 8
    assert ideal_bubble(build("zb_h1", 4, 1, 8)) == 1 / 8  # (p - 1) / 3m
    assert simulated("1f1b", 4, 1, 8).busy == (24, 24, 24, 24)


def test_bubble_of_forward_only_schedule():
    for m in range(4, 14):
        timeline = simulate(build("auto", 4, 2, m, training=False))
        assert timeline.bubble_fraction == Fraction(3, 2 * m)


def test_spans_respect_dependencies_and_latency():
    latency = Fraction(1, 3)
    schedule = build("interleaved_1f1b", 3, 2, 7)
    timeline = simulate(
        schedule, Costs(forward=[1, 2, 1, 3, 1, 2], backward=[2, 3, 2, 4, 2, 3], latency=latency)
    )
    ends = {str(span.action): span.end for spans in timeline.spans for span in spans}
    starts = {str(span.action): span.start for spans in timeline.spans for span in spans}
    for microbatch in range(7):
        for stage in range(1, 6):
            assert starts[f"F{stage}.{microbatch}"] >= ends[f"F{stage - 1}.{microbatch}"] + latency
            assert starts[f"B{stage - 1}.{microbatch}"] >= ends[f"B{stage}.{microbatch}"] + latency
        assert starts[f"B5.{microbatch}"] >= ends[f"F5.{microbatch}"]
    for spans in timeline.spans:
        assert all(before.end <= after.start for before, after in pairwise(spans))


def test_slowest_stage_determines_step_time():
    timeline = simulated("1f1b", 2, 1, 50, forward=[1, 2], backward=[1, 2])
    assert timeline.busy == (100, 200)
    assert timeline.step_time == 1 + 200 + 1


def test_latency_adds_at_every_stage_boundary():
    assert simulated("1f1b", 4, 1, 1, latency=5).step_time == 4 * 3 + 6 * 5


def test_send_occupies_its_rank():
    # One microbatch: four forwards and backwards in turn, and a send after each but the last one of
    # each direction.
    assert simulated("1f1b", 4, 1, 1, send=5).step_time == 4 * 3 + 6 * 5
    # The last rank of two sends back 6 gradients between its 6 forwards and backwards.
    timeline = simulated("1f1b", 2, 1, 6, send=Fraction(1, 2))
    assert timeline.busy == (18, 18)
    assert own_time(timeline)[1] == 18 + 5 * Fraction(1, 2)


def test_adjacent_stages_on_one_rank_have_no_latency():
    timeline = simulated("zb_v", 2, 2, 1, forward=1, backward=1, weight=0, latency=100)
    assert timeline.step_time == 4 + 4 + 4 * 100


def test_reductions_overlap_with_computations():
    schedule = build("interleaved_1f1b", 2, 2, 4)
    plain = simulate(schedule)
    assert plain.reductions == ()
    hidden = simulate(schedule, Costs(reduce=1))
    assert hidden.spans == plain.spans
    assert [str(span.action) for span in hidden.reductions[0]] == ["R2", "R0"]
    last = {
        span.action.stage: span.end
        for spans in plain.spans
        for span in spans
        if span.action.kind == "B"
    }
    assert all(
        span.start == last[span.action.stage] for spans in hidden.reductions for span in spans
    )
    assert hidden.step_time == plain.step_time + 1


def test_long_reductions_are_sequential_and_extend_step():
    schedule = build("interleaved_1f1b", 2, 2, 4)
    plain = simulate(schedule)
    long = simulate(schedule, Costs(reduce=[50, 60, 70, 80]))
    for lane in long.reductions:
        first, second = lane
        assert second.start == first.end
    assert [span.end - span.start for span in long.reductions[0]] == [70, 50]
    start = min(lane[0].start for lane in long.reductions)
    assert long.step_time == max(lane[-1].end for lane in long.reductions) >= start + 120
    assert long.bubble_fraction * sum(plain.busy) == 2 * long.step_time - sum(plain.busy)


def test_memory_curve_of_whole_backward():
    timeline = simulated("1f1b", 2, 1, 2)
    first, second = timeline.memory()
    assert first.points == ((0, 1), (1, 2), (6, 1), (9, 0))
    assert second.points == ((1, 1), (4, 0), (4, 1), (7, 0))
    assert (first.peak, second.peak) == (2, 1)


def test_memory_curve_of_split_backward():
    timeline = simulated("zb_h1", 2, 1, 3, **UNIT)
    order = " ".join(str(span.action) for span in timeline.spans[1])
    assert order == "F1.0 B1.0 F1.1 B1.1 W1.0 F1.2 B1.2 W1.1 W1.2"
    kept = timeline.memory()[1]
    assert [held for _, held in kept.points] == [1, 1, 2, 2, 1, 2, 2, 1, 0]
    assert [time for time, _ in kept.points] == [1, 3, 3, 5, 6, 6, 8, 9, 10]


@pytest.mark.parametrize(
    ("name", "v"),
    [
        ("gpipe", 2),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 3),
        ("zb_h1", 1),
        ("zb_v", 2),
        ("dualpipe_v", 2),
    ],
)
@pytest.mark.parametrize("m", [9, 10])
def test_peak_of_memory_curve_matches_program(name, v, m):
    timeline = simulated(name, 4, v, m)
    peaks = tuple(map(peak_in_flight, timeline.schedule.programs))
    assert tuple(curve.peak for curve in timeline.memory()) == timeline.peak_in_flight == peaks
    assert all(curve.points[-1][1] == 0 for curve in timeline.memory())


def test_deadlocked_schedule_is_refused():
    hangs = from_text("hangs", 2, 1, 1, "RB0.0 B0.0 F0.0 SF0.0", "RF1.0 F1.0 B1.0 SB1.0")
    with pytest.raises(ScheduleError, match=r"rank 0 waits for SB1\.0"):
        simulate(hangs)


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"forward": [1, 2, 3]}, "forward has 3 costs for 4 stages"),
        ({"latency": -1}, "latency=-1"),
        ({"send": -2}, "send=-2"),
        ({"reduce": [1]}, "reduce has 1 costs for 4 stages"),
        ({"backward": [1, float("nan")]}, "backward"),
    ],
)
def test_invalid_costs_are_refused(costs, words):
    schedule = build("1f1b", 4, 1, 2)
    with pytest.raises(ValueError, match=words):
        simulate(schedule, Costs(**costs))


def test_text_draws_long_actions_over_several_columns():
    drawn = simulated("1f1b", 2, 1, 2).text()
    assert drawn.splitlines() == [
        "rank 0  F0.0 F0.1           B0.0 ====      B0.1 ====",
        "rank 1       F1.0 B1.0 ==== F1.1 B1.1 ====",
    ]


def test_empty_timeline_has_zero_step_time():
    timeline = Timeline(Schedule("empty", 1, 1, 1, ((),)), ((),))
    assert timeline.step_time == timeline.bubble_fraction == 0
    assert timeline.text() == "rank 0"
