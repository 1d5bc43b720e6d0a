"""Schedules as pure functions from (p, v, m) to the compute order of each rank.

A compute order has forward and backward actions and, if the backward is split, weight actions.
``build_schedule`` adds communication (lowering.py) and proves the result (verifier.py). To add a
schedule, write its function in ``compute_orders.py``, and add it with its closed forms to the table
of ``schedule_families.py``. A user passes a ``CustomSchedule`` instead.
"""

from lightning_ptdp.schedule.generators.schedule_builder import (
    SCHEDULES,
    build_schedule,
    check_schedule,
    may_split_backward,
    schedule_microbatches,
    schedule_name,
    schedule_placement,
)
from lightning_ptdp.schedule.generators.schedule_families import FAMILIES, CustomSchedule

__all__ = [
    "FAMILIES",
    "SCHEDULES",
    "CustomSchedule",
    "build_schedule",
    "check_schedule",
    "may_split_backward",
    "schedule_microbatches",
    "schedule_name",
    "schedule_placement",
]
