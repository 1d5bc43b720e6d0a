"""Programs simulated by NCCL's rules: all schedules complete, and known hangs are detected."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings

from lightning_ptdp.schedule import SCHEDULES, ScheduleError, verify_schedule
from lightning_ptdp.schedule.lowering import lower
from tests.schedule.builders import build, from_text
from tests.schedule.nccl import Habits, every, operations
from tests.schedule.orders import compute_orders
from tests.schedule.streams import Operation, stuck_operations

pytestmark = pytest.mark.thorough

SIZES = ((2, 1), (2, 4), (2, 7), (3, 5), (4, 1), (4, 2), (4, 8), (5, 12), (8, 16))
FOUR_EACH = Habits(tensor=2, replicas=2)

EARLY = (
    "RF2.0 F0.0 SF0.0 F2.0 RB2.0 RB0.0 SF2.0 B2.0 SB2.0 R2 B0.0 R0",
    "RF1.0 RF3.0 F1.0 SF1.0 F3.0 RB1.0 B3.0 SB3.0 R3 B1.0 SB1.0 R1",
)
"""Earlier lowering of gpipe p2 v2 m1, which posts the receive of B0.0 while B2.0 is in flight."""


def runs(schedule, habits, *, one_queue=False):
    return not any(stuck_operations(operations(schedule, habits), one_queue=one_queue))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("sizes", "habits"),
    [
        (SIZES, Habits()),
        (((2, 3), (4, 4)), FOUR_EACH),
        (((2, 3), (4, 4)), dataclasses.replace(FOUR_EACH, each=True)),
        (((2, 3), (4, 4)), dataclasses.replace(FOUR_EACH, each=True, gathers=True)),
    ],
    ids=["alone", "groups", "sharded gradients", "sharded parameters"],
)
def test_every_schedule_runs_to_completion(name, sizes, habits):
    """All cases but the first add the collectives of tensor groups and replicas."""
    schedules = list(every(name, sizes))
    assert schedules
    for schedule, first_step, one_queue in itertools.product(schedules, *[(True, False)] * 2):
        step = dataclasses.replace(habits, first_step=first_step)
        assert runs(schedule, step, one_queue=one_queue), (schedule.describe(), step, one_queue)


@given(compute_orders())
@settings(max_examples=60, deadline=None)
def test_custom_order_runs_to_completion(order):
    schedule = lower(order)
    assert runs(schedule, Habits(), one_queue=True)
    # In a first step, receives of shapes block a shared queue, so unusual orders may hang there.
    assert runs(schedule, Habits(first_step=True))


def test_early_receive_hangs_shared_queue_and_is_refused():
    early = from_text("early", 2, 2, 1, *EARLY)
    assert runs(early, Habits()) and not runs(early, Habits(), one_queue=True)
    with pytest.raises(
        ScheduleError,
        match=r"receives for the message before theirs: rank 0 at RB0\.0, rank 1 at F3\.0",
    ):
        verify_schedule(early, training=True)


@pytest.mark.parametrize(
    ("name", "v", "programs"),
    [
        ("1f1b", 1, ("F0.0 RB0.0 SF0.0 B0.0 R0", "RF1.0 F1.0 B1.0 SB1.0 R1")),
        ("zb_h1", 1, ("F0.0 RB0.0 SF0.0 B0.0 W0.0 R0", "RF1.0 F1.0 B1.0 SB1.0 W1.0 R1")),
        ("interleaved_1f1b", 2, EARLY),
    ],
    ids=["1f1b", "zb_h1", "interleaved_1f1b"],
)
def test_lazy_connections_hang(name, v, programs):
    """Check that lazy connections hang if both ranks first call different channels.

    Each host then waits for the other's.
    """
    schedule = from_text(name, 2, v, 1, *programs)
    assert runs(schedule, Habits(first_step=True))
    assert not runs(schedule, Habits(first_step=True, connected=False))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b", "zb_v"])
def test_one_communicator_for_both_directions_hangs(name):
    for schedule in every(name, ((4, 8),)):
        if schedule.training:
            assert not runs(schedule, Habits(one_communicator=True)), schedule.describe()


def test_different_collective_orders_on_ranks_hang():
    """Two ranks wait for the collectives of two groups in opposite orders."""

    def rank(*groups):
        program = []
        for group in groups:
            before = (len(program) - 1,) if program else ()
            program.append(Operation(name=group, stream=group, waits=before, meets=group, parts=2))
            program.append(
                Operation(name=f"after {group}", stream="compute", waits=(len(program) - 1,))
            )
        return program

    assert stuck_operations([rank("tensor", "context"), rank("tensor", "context")]) == [None, None]
    first, second = stuck_operations([rank("tensor", "context"), rank("context", "tensor")])
    assert first.name == "after tensor"
    assert second.name == "after context"


def test_message_without_receive_hangs():
    given = operations(build("1f1b", 2, 1, 2), Habits())
    given[1] = given[1][:2]
    assert stuck_operations(given)[0] is not None
