"""Zero-bubble schedules and DualPipeV have exactly the bubbles and memory of their papers."""

from fractions import Fraction

import pytest

from lightning_ptdp.schedule import (
    ActionKind,
    Costs,
    peak_in_flight,
    simulate,
)
from lightning_ptdp.schedule.generators.compute_orders import dualpipe_v, one_f_one_b, zb_h1, zb_v
from lightning_ptdp.schedule.unit_run import weights_in_gaps
from tests.schedule.builders import UNIT, build, simulated

pytestmark = pytest.mark.pure


def idle_in_the_middle(timeline):
    """Return each rank's idle time between its first start and its last end."""
    return [
        spans[-1].end - spans[0].start - busy
        for spans, busy in zip(timeline.spans, timeline.busy, strict=True)
    ]


@pytest.mark.parametrize(
    ("forward", "backward", "weight"),
    [(1, 1, 1), (2, 1, 1), (1, 3, 1), (2, 3, 2), (4, 5, 3), (1, 1, 0)],
)
def test_zb_h1_bubble_matches_paper(forward, backward, weight):
    costs = Costs(forward=forward, backward=backward, weight=weight)
    # arXiv 2401.10241, section 3: (p-1)(T_F + T_B - T_W) per rank.
    for p in range(2, 7):
        for m in range(p, max(13, 2 * p + 4)):
            timeline = simulate(build("zb_h1", p, 1, m), costs)
            work, bubble = (
                m * (forward + backward + weight),
                (p - 1) * (forward + backward - weight),
            )
            assert timeline.step_time == work + bubble
            assert timeline.bubble_fraction == Fraction(bubble, work)


def test_zb_h1_has_third_of_1f1b_bubble_with_same_memory():
    for p in range(2, 7):
        for m in range(1, 3 * p):
            mine, other = (
                simulated("zb_h1", p, 1, m, **UNIT),
                simulated("1f1b", p, 1, m, forward=1, backward=2),
            )
            assert mine.peak_in_flight == (min(m, p),) * p
            assert max(other.peak_in_flight) == min(m, p)
            assert mine.step_time < other.step_time
            if m >= p:
                assert 3 * mine.bubble_fraction == other.bubble_fraction


def test_zb_v_has_zero_bubble_between_first_and_last_action():
    for p in range(2, 7):
        for m in range(2 * p - 1, max(12, 4 * p)):
            timeline = simulated("zb_v", p, 2, m, **UNIT)
            assert idle_in_the_middle(timeline) == [0] * p
            assert timeline.busy == (6 * m,) * p
            assert timeline.step_time == 6 * m + p - 1
            assert timeline.peak_in_flight == (2 * p,) * p


def test_zb_v_step_time_is_minimal_with_p_or_more_microbatches():
    for p in range(2, 7):
        for m in range(1, 3 * p):
            timeline = simulated("zb_v", p, 2, m, **UNIT)
            # The last rank waits p-1 for its first microbatch; one microbatch alone takes 4p, and a
            # weight gradient follows.
            assert (
                timeline.step_time == 6 * m + p - 1
                if m >= p
                else timeline.step_time >= max(6 * m + p - 1, 4 * p + 1)
            )
            assert timeline.step_time <= simulated("dualpipe_v", p, 2, m, **UNIT).step_time
            assert max(timeline.peak_in_flight) <= min(2 * m, 2 * p)


@pytest.mark.parametrize(
    ("forward", "backward", "weight"), [(1, 1, 1), (2, 2, 1), (1, 1, 0), (3, 3, 2)]
)
def test_dualpipe_v_memory_and_bubble_match_docstring(forward, backward, weight):
    for p in range(2, 6):
        for m in range(2 * p, 3 * p + 2):
            schedule = build("dualpipe_v", p, 2, m)
            timeline = simulate(schedule, Costs(forward=forward, backward=backward, weight=weight))
            assert timeline.step_time - 2 * m * (forward + backward + weight) == (p - 1) * (
                forward + backward - weight
            )
            assert timeline.peak_in_flight == (2 * p + 1,) * p


def test_dualpipe_v_defers_only_last_weight_gradients():
    for p in range(2, 7):
        for m in range(2 * p, 3 * p):
            for rank, order in enumerate(dualpipe_v(p, 2, m)):
                waiting = [
                    action
                    for action, following in zip(order, (*order[1:], None), strict=True)
                    if action.kind is ActionKind.BACKWARD
                    and following is not None
                    and following.kind is not ActionKind.WEIGHT
                ]
                assert len(waiting) <= p
                assert all(
                    action.microbatch is not None and action.microbatch >= m - p
                    for action in waiting
                ), (rank, waiting)


def test_step_time_and_memory_grow_with_microbatches():
    for name in ("zb_h1", "zb_v", "dualpipe_v"):
        for p in range(2, 7):
            before = None
            for m in range(1, 3 * p):
                now = simulated(name, p, 1 if name == "zb_h1" else 2, m, **UNIT)
                assert before is None or before.step_time < now.step_time
                assert before is None or max(before.peak_in_flight) <= max(now.peak_in_flight)
                before = now


def test_single_rank_finishes_each_microbatch_before_next():
    for m in (1, 2, 5):
        (order,) = zb_h1(1, 1, m)
        assert [str(action) for action in order[:3]] == ["F0.0", "B0.0", "W0.0"]
        for function in (zb_v, dualpipe_v):
            (order,) = function(1, 2, m)
            assert len(order) == 6 * m
            assert peak_in_flight(order) <= 3
        assert simulated("zb_v", 1, 1, m).peak_in_flight == (1,)


def test_weights_in_gaps_respects_memory_limit():
    orders = one_f_one_b(2, 1, 3)
    roomy = weights_in_gaps(orders, num_stages=2, num_microbatches=3, limit=9)
    tight = weights_in_gaps(orders, num_stages=2, num_microbatches=3, limit=2)
    assert " ".join(map(str, roomy[1])) == "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 W1.0 W1.1 W1.2"
    assert [peak_in_flight(order) for order in tight] == [2, 2]
    with pytest.raises(AssertionError, match="limit of 1"):
        weights_in_gaps(orders, num_stages=2, num_microbatches=3, limit=1)


def test_evaluation_bubble_of_v_placement_matches_docstring():
    for p in range(2, 6):
        for m in range(1, 12):
            schedule = build("zb_v", p, 2, m, training=False)
            assert simulate(schedule).step_time == 2 * (m + p - 1)
