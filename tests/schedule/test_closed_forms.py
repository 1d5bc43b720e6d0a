"""The closed-form costs of schedules match the simulator."""

import pytest

from lightning_ptdp.schedule import Costs, simulate
from lightning_ptdp.schedule.generators import FAMILIES
from tests.schedule.builders import build

pytestmark = pytest.mark.pure

CHUNKS = {
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved_1f1b": (2, 3),
    "zb_h1": (1,),
    "zb_v": (2,),
    "dualpipe_v": (2,),
}
TIMES = [(120, 240, 120), (120, 360, 120), (120, 252, 108), (120, 300, 100)]
"""Times of forward, whole backward and weight gradient: as in the papers, with recomputation, with
attention, with both."""


def step_time(schedule, times, *, latency):
    (forward, backward, weight), v = times, schedule.virtual_pipeline_size
    own = backward - (weight if schedule.splits_backward else 0)
    return float(
        simulate(
            schedule,
            Costs(forward=forward / v, backward=own / v, weight=weight / v, latency=latency),
        ).step_time
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_closed_form_costs_match_simulation(name, p):
    form = FAMILIES[name]
    for v in CHUNKS[name]:
        for m in range(form.least(p), 13):
            schedule = build(name, p, v, m)
            assert schedule.splits_backward == FAMILIES[name].splits_backward
            for times in TIMES:
                forward, backward, weight = times
                ideal = m * (forward + backward)
                length = step_time(schedule, times, latency=0)
                assert length == pytest.approx(
                    ideal + form.bubble(p, v, forward, backward, weight)
                ), (v, m)
                waits = (step_time(schedule, times, latency=0.01) - length) / 0.01
                assert waits - 0.01 <= form.waits(p, v, m) <= 3 * waits + 4 * p, (v, m, waits)
            peaks = simulate(schedule).peak_in_flight
            held = tuple(form.held(p, v, m, rank) for rank in range(p))
            if name in ("gpipe", "1f1b") or m % p == 0:
                assert held == peaks, (v, m)
            assert all(most >= peak for most, peak in zip(held, peaks, strict=True)), (
                v,
                m,
                held,
                peaks,
            )


def test_closed_form_bubbles_match_paper():
    # arXiv 2104.04473, section 2.2: (p - 1) / m, and (p - 1) / (v m) interleaved.
    assert FAMILIES["1f1b"].bubble(8, 1, 1.0, 2.0, 1.0) / (16 * 3.0) == pytest.approx(7 / 16)
    assert FAMILIES["interleaved_1f1b"].bubble(8, 4, 1.0, 2.0, 1.0) / (16 * 3.0) == pytest.approx(
        7 / 16 / 4
    )
