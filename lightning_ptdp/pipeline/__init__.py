"""Pipeline parallelism. A schedule is data: built, proven, timed and drawn here without torch, a process or a model.

    schedule = build_schedule("interleaved_1f1b", pipeline_parallel_size=4, virtual_pipeline_size=2, num_microbatches=8)
    print(schedule.text())
    print(simulate(schedule).bubble_fraction)        # 3/16

``stage.py``, ``p2p.py`` and ``runtime.py``, which need torch, execute it; ``timeline.py`` draws it.
"""

from lightning_ptdp.pipeline.actions import Action, ActionKind, Channel, Schedule, peak_in_flight
from lightning_ptdp.pipeline.partition import check_num_layers, explicit_partition, partition_layers
from lightning_ptdp.pipeline.schedules import SCHEDULES, build_schedule
from lightning_ptdp.pipeline.simulate import Costs, Span, Timeline, simulate
from lightning_ptdp.pipeline.verify import ScheduleError, verify_schedule

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Channel",
    "Costs",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "build_schedule",
    "check_num_layers",
    "explicit_partition",
    "partition_layers",
    "peak_in_flight",
    "simulate",
    "verify_schedule",
]
