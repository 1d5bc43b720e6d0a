"""Thread blocks of a GPU that messages and collectives hold.

A receive that was posted early holds its blocks until its send arrives. With few blocks per
message, every schedule fits on an H100 in any order of events."""

import itertools
from dataclasses import replace

import pytest

from lightning_ptdp.schedule import SCHEDULES
from lightning_ptdp.schedule.actions import MESSAGES
from lightning_ptdp.world.communicators import CHANNEL_CTAS
from tests.schedule.builders import build
from tests.schedule.nccl import Habits, every, operations
from tests.schedule.streams import (
    Operation,
    delayed_operations,
    most_blocks,
    stuck_operations,
)

pytestmark = pytest.mark.thorough

H100, A100 = 132, 108
UNLIMITED = 32
"""Thread blocks that NCCL may choose for a message, and for a collective."""
FEW = Habits(tensor=2, replicas=2, message_blocks=CHANNEL_CTAS, collective_blocks=UNLIMITED)
MANY = replace(FEW, message_blocks=UNLIMITED)
SIZES = ((2, 1), (2, 4), (2, 7), (3, 5), (4, 1), (4, 8), (5, 12), (8, 16))
V = ("zb_v", "dualpipe_v")


def runs(schedule, habits, budget, *, one_queue=False):
    programs = operations(schedule, habits)
    return not any(stuck_operations(programs, one_queue=one_queue, budget=budget))


def bound(schedule, habits):
    return max(map(most_blocks, operations(schedule, habits)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_thread_blocks_of_every_schedule_fit_on_h100(name):
    """Check the bound, which holds in any order of events.

    One more collective fits, because reductions in two levels have two communicators.
    """
    for schedule, first_step in itertools.product(every(name, SIZES), (True, False)):
        habits = replace(FEW, first_step=first_step)
        assert bound(schedule, habits) + UNLIMITED <= H100, schedule.describe()


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_within_block_budget(name):
    for schedule, one_queue in itertools.product(every(name, ((2, 4), (3, 6))), (False, True)):
        assert runs(schedule, FEW, H100, one_queue=one_queue), schedule.describe()


@pytest.mark.parametrize(
    ("name", "p", "budget"),
    [
        ("zb_v", 2, H100),
        ("zb_v", 4, H100),
        ("dualpipe_v", 4, H100),
        ("interleaved_1f1b", 2, A100),
        ("interleaved_1f1b", 4, A100),
    ],
)
def test_messages_with_32_blocks_delay_collectives(name, p, budget):
    schedule = build(name, p, 2, 4 * p)
    assert bound(schedule, MANY) > H100
    assert "tensor" in delayed(schedule, MANY, budget)
    assert not delayed(schedule, FEW, budget)


def delayed(schedule, habits, budget):
    return {
        str(operation.stream)
        for operations_of_rank in delayed_operations(operations(schedule, habits), budget=budget)
        for operation in operations_of_rank
    }


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "auto"])
def test_receives_posted_ahead_stay_within_documented_bounds(name):
    """Check the table in docs/machines.md."""
    sizes = [*itertools.product((2, 3, 4, 5), range(1, 17)), (8, 16), (8, 32)]
    for schedule in every(name, sizes):
        receives, channels = posted_ahead(schedule)
        most_receives, most_channels = in_docs(name, schedule)
        assert receives <= most_receives, schedule.describe()
        assert channels <= most_channels, schedule.describe()


def in_docs(name, schedule):
    p = schedule.pipeline_parallel_size
    if name in V:
        return (2, 2) if p == 2 else (3, 3)
    if name == "interleaved_1f1b":
        return max(p + 2, 3 * p // 2), 2
    return (p if schedule.virtual_pipeline_size > 1 else 2), 2


def posted_ahead(schedule):
    """Return the largest numbers of receives, and of their channels, posted at once on a rank."""
    kinds = {message.receive: kind for kind, message in MESSAGES.items()}
    receives = channels = 0
    for program in schedule.programs:
        posted = {}
        for action in program:
            if action.kind in kinds:
                taken = replace(action, kind=kinds[action.kind])
                posted[taken] = schedule.channel(action)
                receives = max(receives, len(posted))
                channels = max(channels, len({*posted.values()}))
            posted.pop(action, None)
    return receives, channels


def test_posted_receive_holds_blocks_until_send_arrives():
    """The sender needs a collective before it sends."""

    def message(*waits):
        return Operation(
            name="message", stream="channel", meets="message", parts=2, blocks=2, waits=waits
        )

    collective = Operation(name="sum", stream="tensor", meets="sum", parts=2, blocks=3)
    programs = [[message(), collective], [collective, message(0)]]
    assert list(map(most_blocks, programs)) == [5, 5]
    assert stuck_operations(programs, budget=5) == [None, None]
    assert delayed_operations(programs, budget=5) == [[], []]
    assert stuck_operations(programs, budget=4) == [collective, message(0)]
    assert delayed_operations(programs, budget=4) == [[collective], []]
    # The message frees its blocks, so a later collective has enough.
    programs = [[message(), collective], [message(), collective]]
    assert stuck_operations(programs, budget=4) == [None, None]
