"""Errors of a faulty schedule, which show the programs near the fault with an arrow."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.schedule.actions import OF_STAGES, Action, Schedule

_AROUND = 12
"""Actions that are shown before and after a fault."""


class ScheduleError(PTDPError, ValueError):
    """A schedule that is incomplete, out of order, or would hang.

    The message shows the place with an arrow.

    Attributes:
        reason: The fault, in one line.
        marks: Place of the fault: rank -> position in its program (the program's length is its
            end).
    """

    def __init__(
        self, message: str, *, reason: str = "", marks: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason or message
        self.marks = dict(marks or {})


def schedule_error(schedule: Schedule, marks: Mapping[int, int], reason: str) -> ScheduleError:
    """Return an error that shows the actions around each of ``marks``: rank -> position."""
    lines = []
    for rank, program in enumerate(schedule.programs):
        if len(schedule.programs) > 16 and rank not in marks:
            continue
        center = marks.get(rank, 0)
        start = max(center - _AROUND, 0)
        stop = max(center, _AROUND) + _AROUND
        words = [
            ("--> " if marks.get(rank) == i else "") + str(program[i])
            for i in range(start, min(stop, len(program)))
        ]
        if marks.get(rank) == len(program):
            words.append("--> (end)")
        line = " ".join(["…"] * (start > 0) + words + ["…"] * (stop < len(program)))
        lines.append(f"rank {rank}  {line}")
    message = f"{schedule.describe()}: {reason}\n" + "\n".join(lines)
    return ScheduleError(message, reason=reason, marks=marks)


def why_illegal(schedule: Schedule, action: Action, rank: int) -> str:
    """Return the reason why the placement of stages does not allow ``action`` on ``rank``."""
    last = schedule.num_microbatches - 1
    if action.stage not in range(schedule.num_stages):
        return f"{action} does not exist: stages are 0 to {schedule.num_stages - 1}"
    if schedule.rank_of(action.stage) != rank:
        return (
            f"{action} is on rank {rank}, but stage {action.stage} is on rank "
            f"{schedule.rank_of(action.stage)}"
        )
    if (action.kind in OF_STAGES) != (action.microbatch is None) or (
        action.microbatch or 0
    ) not in range(last + 1):
        return (
            f"{action} does not exist: microbatches are 0 to {last}, and only R, G and D have none"
        )
    return f"{action} has no peer: the neighbouring stage does not exist or is on the same rank"
