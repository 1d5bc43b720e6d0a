"""CSV files of schedules: one line per rank, one computation per cell in its printed form.

An example::

    # two ranks, two microbatches, the backward split
    F0.0,F0.1,,B0.0,W0.0,B0.1,W0.1
    ,F1.0,B1.0,F1.1,B1.1,W1.0,W1.1

``F``, ``B`` and ``W`` are followed by stage.microbatch. Blank cells have no meaning; they can align
the columns with time. Text after a ``#`` is a comment, and a line without a computation is skipped.
Communication and reductions are not written in the file; they are added on loading. p is the number
of lines. v, m and the placement of the stages are inferred.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from lightning_ptdp.schedule.actions import COMPUTE, Action, Schedule, ScheduleError
from lightning_ptdp.schedule.lowering import compute_order, lower
from lightning_ptdp.schedule.unit_run import run_compute_order
from lightning_ptdp.schedule.verifier import verify_schedule
from lightning_ptdp.world.axes import PLACEMENTS


@dataclass(frozen=True, slots=True)
class _Line:
    """Computations of one rank, and the number of their line in the file (from 1)."""

    number: int
    actions: tuple[Action, ...]


def load_schedule(path: str | Path) -> Schedule:
    """Read, lower and prove the schedule of one training step; it is named after the file.

    Args:
        path: A CSV file as described above, UTF-8.

    Raises:
        ValueError: The file cannot be read; a cell is not a computation; a rank holds stages that
            no placement gives it; or a computation is missing, repeated, or in an order that cannot
            run. The message names the file, the line, the action and the fix.
    """
    lines = _read(Path(path))
    line_numbers = _line_numbers(path, lines)
    stages = _count_stages(path, lines)
    microbatches = 1 + max(action.microbatch or 0 for action in line_numbers)
    programs = tuple(line.actions for line in lines)
    order = _placed(
        path,
        lines,
        Schedule(Path(path).stem, len(lines), stages // len(lines), microbatches, programs),
        stages,
    )
    _check_complete(path, lines, line_numbers, order)
    try:
        schedule = lower(order)
    except ScheduleError as error:
        at = ", ".join(
            f"line {lines[rank].number} at {programs[rank][position]}"
            for rank, position in error.marks.items()
        )
        drawing = str(error).partition("\n")[2]
        message = (
            f"{path}, {at}: {error.reason}. Move the awaited action to an earlier cell\n{drawing}"
        )
        raise ScheduleError(message, reason=error.reason, marks=error.marks) from None
    verify_schedule(schedule, training=True)
    return schedule


def dump_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule's computations to a CSV file, one column per unit of time.

    ``load_schedule`` reads the file.

    Raises:
        ScheduleError: The schedule does not run to its end.
    """
    order = compute_order(schedule)
    _, ends = run_compute_order(order)
    rows = [f"# {schedule.describe()}, stages placed in a {schedule.placement}"]
    for program, times in zip(order.programs, ends, strict=True):
        cells = [""] * max(times, default=0)
        for action, end in zip(program, times, strict=True):
            cells[end - 1] = str(action)
        rows.append(",".join(cells))
    Path(path).write_text("\n".join(rows) + "\n", encoding="utf-8")


def _read(path: Path) -> list[_Line]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # not text, or not a valid file name
        raise ValueError(f"{path} cannot be read as a schedule: {error}") from None
    lines = []
    for number, row in enumerate(text.splitlines(), start=1):
        cells = [cell.strip().strip('"') for cell in row.partition("#")[0].split(",")]
        actions = tuple(_action(path, number, cell) for cell in cells if cell)
        if actions:
            lines.append(_Line(number, actions))
    if not lines:
        raise ValueError(f"{path} has no computation. Write one line per rank, such as F0.0,B0.0")
    return lines


def _action(path: Path, number: int, cell: str) -> Action:
    try:
        action = Action.parse(cell)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}") from None
    if action.kind not in COMPUTE:
        raise ValueError(
            f"{path}, line {number}: {cell} is not a computation. Remove it: communication and "
            "reductions are added automatically"
        )
    return action


def _line_numbers(path: str | Path, lines: list[_Line]) -> dict[Action, int]:
    """Return the line number of each action; every action must occur once."""
    first: dict[Action, int] = {}
    for line in lines:
        for action in line.actions:
            if action in first:
                raise ValueError(
                    f"{path}, line {line.number}: {action} is also in line {first[action]}. "
                    "Remove one of them"
                )
            first[action] = line.number
    return first


def _count_stages(path: str | Path, lines: list[_Line]) -> int:
    """Return the number of stages, p * v; every stage up to the highest must be named."""
    line, highest = max(
        ((line, action) for line in lines for action in line.actions),
        key=lambda pair: pair[1].stage,
    )
    stages = {action.stage for row in lines for action in row.actions}
    if len(stages) <= highest.stage:
        gap = next(stage for stage in range(highest.stage) if stage not in stages)
        raise ValueError(
            f"{path}, line {line.number}: {highest} is beyond the last stage, because stage "
            f"{gap} is missing. Add stage {gap}, or correct the cell"
        )
    return highest.stage + 1


def _placed(path: str | Path, lines: list[_Line], order: Schedule, stages: int) -> Schedule:
    """Return ``order`` with the placement that gives every rank the stages of its line."""
    p = len(lines)
    if stages % p:
        raise ValueError(
            f"{path} has the stages 0 to {stages - 1} on {p} lines. Every line is a rank, and "
            "all ranks have the same number of stages. Add the stages up to "
            f"{-(-stages // p) * p - 1}, or write one line per rank"
        )
    faults = []
    for placement in PLACEMENTS if stages == 2 * p else PLACEMENTS[:1]:
        placed = dataclasses.replace(order, placement=placement)
        cells = [(rank, line, action) for rank, line in enumerate(lines) for action in line.actions]
        mismatch = next((cell for cell in cells if placed.rank_of(cell[2].stage) != cell[0]), None)
        if mismatch is None:
            return placed
        rank, line, action = mismatch
        expected = f"stage{'s' * (stages > p)} {' and '.join(map(str, placed.stages_of(rank)))}"
        faults.append(
            f"line {line.number} has {action}, but in the placement {placement} this rank has "
            f"{expected}"
        )
    raise ValueError(
        f"{path}: the stages of the ranks match no placement: {'; '.join(faults)}. Move the "
        "action to the line of its rank"
    )


def _check_complete(
    path: str | Path, lines: list[_Line], existing: Container[Action], order: Schedule
) -> None:
    kinds = COMPUTE if order.splits_backward else COMPUTE[:2]
    stages = order.num_stages
    microbatches = order.num_microbatches
    expected = itertools.starmap(
        Action, itertools.product(kinds, range(stages), range(microbatches))
    )
    missing = next((action for action in expected if action not in existing), None)
    if missing is not None:
        line = lines[order.rank_of(missing.stage)].number
        raise ValueError(
            f"{path}, line {line}: {missing} is missing. Add it (there are {stages} stages and "
            f"{microbatches} microbatches"
            + (", and the backward is split)" if order.splits_backward else ")")
        )
