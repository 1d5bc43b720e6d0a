"""Schedules as pure functions from (p, v, m) to the compute order of each rank.

A compute order has forward and backward actions and, if the backward is split, weight actions.
``build_schedule`` adds communication (lowering.py) and proves the result (verifier.py). To add a
schedule, write its function in one of these files, and add it with its closed forms to the table of
``schedule_families.py``. A user passes a ``CustomSchedule`` instead.
"""

from lightning_ptdp.schedule.generators.one_forward_one_backward import (
    forward_only,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
)
from lightning_ptdp.schedule.generators.orders import Orders, in_turns, weights_in_gaps
from lightning_ptdp.schedule.generators.schedule_builder import (
    SCHEDULES,
    build_schedule,
    check_schedule,
    may_split_backward,
    schedule_microbatches,
    schedule_name,
    schedule_placement,
)
from lightning_ptdp.schedule.generators.schedule_families import (
    FAMILIES,
    ClosedForm,
    CustomSchedule,
    ScheduleFamily,
)
from lightning_ptdp.schedule.generators.zero_bubble import dualpipe_v, zb_h1, zb_v

__all__ = [
    "FAMILIES",
    "SCHEDULES",
    "ClosedForm",
    "CustomSchedule",
    "Orders",
    "ScheduleFamily",
    "build_schedule",
    "check_schedule",
    "dualpipe_v",
    "forward_only",
    "gpipe",
    "in_turns",
    "interleaved_one_f_one_b",
    "may_split_backward",
    "one_f_one_b",
    "schedule_microbatches",
    "schedule_name",
    "schedule_placement",
    "weights_in_gaps",
    "zb_h1",
    "zb_v",
]
