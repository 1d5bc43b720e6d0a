"""Gathers of sharded parameters as actions of a program: when a rank holds which chunk whole.

A chunk is gathered one computation ahead of its use, so that the messages travel during that
computation. Once as many chunks are whole as are allowed, the one whose next use is farthest away
is freed first. Of all orders this one gathers least often (L. A. Belady, A study of replacement
algorithms for a virtual-storage computer, 1966)::

    rank 0 of p2 v2   G0 F0.0 F0.1 G2 F2.0 F2.1 B2.0 B2.1 D2 B0.0 B0.1 D0

All replicas of a rank run the same program, and so take part in the same gathers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from lightning_ptdp.schedule.actions import Action, ActionKind, Schedule
from lightning_ptdp.schedule.schedule_error import schedule_error

_GATHERS = (ActionKind.GATHER, ActionKind.FREE)
_USES = (ActionKind.FORWARD, ActionKind.BACKWARD)
"""Computations that read parameters; the gradient of a weight does not need the weight."""


def with_gathers(schedule: Schedule, whole_chunks: int) -> Schedule:
    """Add gathers to a full schedule; at most ``whole_chunks`` chunks of a rank are whole."""
    programs = tuple(tuple(_gathered(program, whole_chunks)) for program in schedule.programs)
    gathered = dataclasses.replace(schedule, programs=programs)
    check_gathers(gathered)
    return gathered


def without_gathers(schedule: Schedule) -> Schedule:
    """Return the schedule without its gathers."""
    programs = tuple(
        tuple(action for action in program if action.kind not in _GATHERS)
        for program in schedule.programs
    )
    return dataclasses.replace(schedule, programs=programs)


def num_gathers(program: Iterable[Action]) -> int:
    """Return how often a rank gathers a chunk in a step."""
    return sum(action.kind is ActionKind.GATHER for action in program)


def check_gathers(schedule: Schedule) -> None:
    """Check that every chunk is whole when it is used, and is freed in the end.

    Raises:
        ScheduleError: It is not; marks the action.
    """
    for rank, program in enumerate(schedule.programs):
        whole: set[int] = set()
        for place, action in enumerate(program):
            stage = action.stage
            reason = ""
            if action.kind is ActionKind.GATHER and stage in whole:
                reason = f"{action} gathers a stage that is whole"
            elif action.kind is ActionKind.FREE and stage not in whole:
                reason = f"{action} frees a stage that is not whole"
            elif action.kind in _USES and stage not in whole:
                reason = f"{action} needs G{stage} before it, without D{stage} between them"
            if reason:
                raise schedule_error(schedule, {rank: place}, reason)
            if action.kind is ActionKind.GATHER:
                whole.add(stage)
            elif action.kind is ActionKind.FREE:
                whole.remove(stage)
        if whole:
            reason = f"D{min(whole)} is missing"
            raise schedule_error(schedule, {rank: len(program)}, reason)


def _gathered(program: tuple[Action, ...], whole_chunks: int) -> Iterator[Action]:
    """Yield the program with gathers."""
    uses = [action.stage for action in program if action.kind in _USES]
    upcoming: dict[int, list[int]] = {}
    for place in range(len(uses) - 1, -1, -1):
        upcoming.setdefault(uses[place], []).append(place)
    whole: set[int] = set()

    def make_whole(stage: int, running: int) -> Iterator[Action]:
        if stage in whole:
            return
        if len(whole) >= whole_chunks:
            farthest = max(whole - {running}, key=lambda one: upcoming[one][-1])
            whole.remove(farthest)
            yield Action(ActionKind.FREE, farthest)
        whole.add(stage)
        yield Action(ActionKind.GATHER, stage)

    place = 0
    for action in program:
        if action.kind not in _USES:
            yield action
            continue
        stage = action.stage
        yield from make_whole(stage, stage)
        upcoming[stage].pop()
        place += 1
        if whole_chunks > 1 and place < len(uses):
            yield from make_whole(uses[place], stage)
        yield action
        if not upcoming[stage]:
            whole.remove(stage)
            yield Action(ActionKind.FREE, stage)
