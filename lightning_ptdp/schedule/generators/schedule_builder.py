"""Builder of a proven ``Schedule`` from a schedule's name and sizes.

Errors name the mistake and its fix.
"""

from __future__ import annotations

import functools
import itertools
from typing import TypeGuard

from lightning_ptdp.base.errors import did_you_mean
from lightning_ptdp.base.garbage_collection import garbage_collection_paused
from lightning_ptdp.base.option_types import Size, check_arguments
from lightning_ptdp.schedule.actions import Action, Schedule
from lightning_ptdp.schedule.generators.compute_orders import (
    forward_only,
    interleaved_one_f_one_b,
    one_f_one_b,
)
from lightning_ptdp.schedule.generators.schedule_families import (
    FAMILIES,
    INTERLEAVED,
    CustomSchedule,
    ScheduleFamily,
)
from lightning_ptdp.schedule.lowering import lower, with_gathers
from lightning_ptdp.schedule.schedule_file import load_schedule
from lightning_ptdp.schedule.verifier import verify_schedule
from lightning_ptdp.world.axes import StagePlacement, check_interleaving

SCHEDULES: tuple[str, ...] = (*FAMILIES, "auto")
"""The names that ``build_schedule`` takes.

It also takes a ``CustomSchedule`` and the path of a CSV file.
"""


def build_schedule(
    name: str | CustomSchedule,
    *,
    pipeline_parallel_size: Size,
    virtual_pipeline_size: Size = 1,
    num_microbatches: Size,
    training: bool = True,
    group_size: Size | None = None,
    max_gathered_chunks: Size | None = None,
) -> Schedule:
    """Return the verified schedule of one step; the same object for the same arguments.

    Without a pipeline (p = 1) every schedule of the package alternates forward and backward, so
    that one microbatch is held at a time.

    Args:
        name: One of ``SCHEDULES``, where ``"auto"`` is 1F1B for v = 1 and interleaved 1F1B for v >
            1; a ``CustomSchedule``; or the path of a file ending in ``.csv`` (schedule_file.py),
            which is read once per process.
        pipeline_parallel_size: p.
        virtual_pipeline_size: v, stages per rank.
        num_microbatches: m, any positive number.
        training: ``False`` gives forwards alone, in the placement of the schedule; the result is
            then named ``"forward_only"``.
        group_size: For interleaved 1F1B: maximum number of microbatches that visit a chunk before
            the next chunk's turn; p or more, by default p. The strategy's
            ``microbatch_group_size``.
        max_gathered_chunks: Chunks of a rank that may be gathered at a time if parameters are
            sharded; adds gathers (lowering.py).

    Raises:
        ValueError: ``check_schedule`` raises an error, or a user's order is incomplete, out of
            order or deadlocks (then a ``ScheduleError`` that marks the place).
    """
    check_arguments(build_schedule, locals())
    p = pipeline_parallel_size
    v = virtual_pipeline_size
    m = num_microbatches
    # Evaluation accepts any number of microbatches, even if the training schedule does not.
    check_schedule(
        name,
        pipeline_parallel_size=p,
        virtual_pipeline_size=v,
        num_microbatches=m if training else None,
        group_size=group_size,
    )
    if name == "auto":
        name = _found(name, v).name
    with garbage_collection_paused():
        return _build(name, p, v, m, training, group_size, max_gathered_chunks)


def check_schedule(
    name: str | CustomSchedule,
    *,
    pipeline_parallel_size: Size,
    virtual_pipeline_size: Size = 1,
    num_microbatches: Size | None = None,
    group_size: Size | None = None,
) -> None:
    """Check that the sizes fit the schedule, without building it.

    The arguments are those of ``build_schedule``.

    Args:
        num_microbatches: m, or None if it is not known yet.

    Raises:
        ValueError: An unknown name, a size that is not a positive integer, or a size that the
            schedule cannot use. The message names the field, the value and the fix.
    """
    check_arguments(check_schedule, locals())
    p = pipeline_parallel_size
    v = virtual_pipeline_size
    spec = _found(name, v)
    check_interleaving(p, v)
    if group_size is not None:
        _check_group_size(spec.name if isinstance(spec, ScheduleFamily) else name, group_size, p)
    if isinstance(spec, Schedule):
        _check_file(str(name), spec, p, v, num_microbatches)
    elif p > 1:
        _check_chunks(spec, v)


def schedule_placement(name: str | CustomSchedule) -> StagePlacement:
    """Return the placement of stages on ranks under a schedule.

    Raises:
        ValueError: An unknown name, or a file that is not a schedule.
    """
    return _found(name).placement


def may_split_backward(name: str | CustomSchedule) -> bool:
    """Return True if the schedule may compute weight gradients separately.

    It is also True for a user's schedule, because its actions are not known yet.
    """
    spec = _found(name)
    return spec.splits_backward if isinstance(spec, ScheduleFamily) else True


def schedule_microbatches(name: str | CustomSchedule) -> int | None:
    """Return the only m that a schedule can train with, or None if it takes any.

    A file is written for one m.

    Raises:
        ValueError: A file that is not a schedule.
    """
    return _loaded(name).num_microbatches if _is_file(name) else None


def schedule_name(name: str | CustomSchedule, virtual_pipeline_size: int) -> str:
    """Return the name of the schedule that ``build_schedule`` makes; the sizes are not needed."""
    return _found(name, virtual_pipeline_size).name


def _found(name: str | CustomSchedule, v: int = 1) -> CustomSchedule | Schedule:
    """Return the known part of a schedule before its sizes; for a file the full schedule.

    Raises:
        ValueError: An unknown name, or a file that is not a schedule.
    """
    if isinstance(name, CustomSchedule):
        return name
    if _is_file(name):
        return _loaded(name)
    if name not in SCHEDULES:
        hint = did_you_mean(str(name), SCHEDULES)
        raise ValueError(
            f"schedule={name!r:.100} is unknown. {hint}Use one of "
            f"{', '.join(map(repr, SCHEDULES))}, a CustomSchedule, or the path of a .csv file"
        )
    auto = "1f1b" if v == 1 else INTERLEAVED
    return FAMILIES[auto if name == "auto" else name]


def _is_file(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and name.endswith(".csv")


def _check_group_size(name: str | CustomSchedule, group_size: int, p: int) -> None:
    if name != INTERLEAVED:
        raise ValueError(
            f"microbatch_group_size={group_size} applies to schedule='interleaved_1f1b' only, "
            f"but schedule={name!r}. Leave it out, or use schedule='interleaved_1f1b' with "
            "virtual_pipeline_size 2 or more"
        )
    if group_size < p:
        raise ValueError(
            f"microbatch_group_size={group_size} is less than pipeline_parallel_size={p}, so "
            f"ranks would wait for each other between chunks. Use microbatch_group_size={p} or "
            "more, or leave it out"
        )


def _check_chunks(spec: CustomSchedule, v: int) -> None:
    name = spec.name
    if spec.placement == "v" and v != 2:
        problem = "places two stages per rank in a V"
        remedy = "virtual_pipeline_size=2"
        if isinstance(spec, ScheduleFamily):
            remedy += f", or schedule={spec.otherwise if v == 1 else INTERLEAVED!r}"
    elif not isinstance(spec, ScheduleFamily):
        return
    elif spec.chunks == "one" and v > 1:
        problem = "has one stage per rank"
        remedy = f"schedule={spec.otherwise!r}"
        if name == "1f1b":
            remedy += " (or 'auto')"
        elif v != 2:
            remedy += " with virtual_pipeline_size=2"
        remedy += ", or virtual_pipeline_size=1"
    elif spec.chunks == "several" and v == 1:
        problem = "needs two or more stages per rank"
        remedy = f"virtual_pipeline_size=2 or more, or schedule={spec.otherwise!r} (or 'auto')"
    else:
        return
    raise ValueError(f"schedule={name!r} {problem}, but virtual_pipeline_size={v}. Use {remedy}")


def _check_file(path: str, schedule: Schedule, p: int, v: int, m: int | None) -> None:
    sizes = {"pipeline_parallel_size": p, "virtual_pipeline_size": v, "num_microbatches": m}
    for field, value in sizes.items():
        expected = getattr(schedule, field)
        if value is None or value == expected:
            continue
        hint = ""
        if field == "num_microbatches" and value < expected:
            hint = (
                ". A batch with fewer samples than microbatches does not fit, such as the last "
                "one (drop_last=True leaves it out)"
            )
        raise ValueError(
            f"schedule={path!r} is written for {field}={expected}, not {value}. Use "
            f"{field}={expected}, or a schedule for {value}{hint}"
        )


# A run uses few sizes (training, evaluation, a shorter last batch). A large schedule takes some 100
# MB.
@functools.lru_cache(maxsize=16)
def _build(
    name: str | CustomSchedule,
    p: int,
    v: int,
    m: int,
    training: bool,
    group_size: int | None,
    max_gathered_chunks: int | None,
) -> Schedule:
    if training and _is_file(name):
        schedule = _loaded(name)
    else:
        orders = (
            _evaluation(name, p, v, m) if not training else _training(name, p, v, m, group_size)
        )
        schedule = lower(orders)
        verify_schedule(schedule, training=training)
    return schedule if max_gathered_chunks is None else with_gathers(schedule, max_gathered_chunks)


def _evaluation(name: str | CustomSchedule, p: int, v: int, m: int) -> Schedule:
    """Return the compute orders of forwards alone."""
    placement = schedule_placement(name)
    # Without a pipeline there is one stage, and no V.
    orders = forward_only(p, v, m, placement if v > 1 else "loop")
    return Schedule("forward_only", p, v, m, orders, placement)


def _training(
    name: str | CustomSchedule, p: int, v: int, m: int, group_size: int | None
) -> Schedule:
    """Return the compute orders of a schedule that is not read from a file."""
    spec = _found(name, v)
    assert isinstance(spec, CustomSchedule)
    order = spec.order
    if p == 1 and isinstance(spec, ScheduleFamily):
        order = one_f_one_b
    elif group_size is not None:
        order = functools.partial(interleaved_one_f_one_b, group_size=group_size)
    orders = tuple(map(tuple, order(p, v, m)))
    for action in itertools.chain(*orders):
        if not isinstance(action, Action):
            raise ValueError(
                f"the order of schedule {spec.name!r} has {action!r}, which is not an Action. "
                "Use Action.parse"
            )
    return Schedule(spec.name, p, v, m, orders, spec.placement)


@functools.lru_cache(maxsize=8)
def _loaded(path: str) -> Schedule:
    return load_schedule(path)
