"""Pipeline schedules as data, built, proven, timed and drawn without torch.

Neither a process nor a model is needed::

    schedule = build_schedule(
        "interleaved_1f1b",
        pipeline_parallel_size=4,
        virtual_pipeline_size=2,
        num_microbatches=8,
    )
    print(schedule.text())
    print(simulate(schedule).bubble_fraction)        # 3/16

``generators/`` defines the compute order of each rank. ``lowering.py`` adds communication,
``verifier.py`` proves the result, and ``schedule_timeline.py`` draws it. The package ``pipeline``,
which needs torch, executes it.
"""

from lightning_ptdp.schedule.actions import (
    Action,
    ActionKind,
    Channel,
    Schedule,
    ScheduleError,
    peak_in_flight,
)
from lightning_ptdp.schedule.generators import (
    SCHEDULES,
    CustomSchedule,
    build_schedule,
    check_schedule,
    schedule_microbatches,
    schedule_placement,
)
from lightning_ptdp.schedule.partition import check_num_layers, explicit_partition, partition_layers
from lightning_ptdp.schedule.schedule_file import dump_schedule, load_schedule
from lightning_ptdp.schedule.simulate import (
    Costs,
    MemoryCurve,
    Span,
    Timeline,
    ideal_bubble,
    simulate,
)
from lightning_ptdp.schedule.verifier import verify_schedule

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Channel",
    "Costs",
    "CustomSchedule",
    "MemoryCurve",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "build_schedule",
    "check_num_layers",
    "check_schedule",
    "dump_schedule",
    "explicit_partition",
    "ideal_bubble",
    "load_schedule",
    "partition_layers",
    "peak_in_flight",
    "schedule_microbatches",
    "schedule_placement",
    "simulate",
    "verify_schedule",
]
