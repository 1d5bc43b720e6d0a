"""How a faulty schedule is shown: the programs near the fault, with an arrow."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_ptdp.schedule.actions import Schedule

__all__ = ["ScheduleError", "schedule_error"]


class ScheduleError(ValueError):
    """A schedule that is incomplete, out of order, or would hang; the message shows where, with an arrow.

    Attributes:
        reason: What is wrong, in one line.
        marks: Where: rank -> position in its program (the length of the program is its end).
    """

    def __init__(self, message: str, *, reason: str = "", marks: Mapping[int, int] | None = None) -> None:
        super().__init__(message)
        self.reason = reason or message
        self.marks = dict(marks or {})


def schedule_error(schedule: Schedule, marks: Mapping[int, int], reason: str, *, around: int = 12) -> ScheduleError:
    """The error with ``around`` actions of the programs before and after each of ``marks``."""
    lines = []
    for rank, program in enumerate(schedule.programs):
        if len(schedule.programs) > 16 and rank not in marks:
            continue
        center = marks.get(rank, 0)
        start, stop = max(center - around, 0), max(center, around) + around
        words = [("--> " if marks.get(rank) == i else "") + str(program[i]) for i in range(start, min(stop, len(program)))]
        if marks.get(rank) == len(program):
            words.append("--> (end)")
        line = " ".join(["…"] * (start > 0) + words + ["…"] * (stop < len(program)))
        lines.append(f"rank {rank}  {line}")
    message = f"{schedule.describe()}: {reason}\n" + "\n".join(lines)
    return ScheduleError(message, reason=reason, marks=marks)
