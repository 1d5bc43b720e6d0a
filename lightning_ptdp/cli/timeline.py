"""The verb ``ptdp timeline``: pictures, traces and numbers of pipeline schedules.

The schedules are simulated; nothing is run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from lightning_ptdp.base.output import columns
from lightning_ptdp.cli.command_line import check_output, listed
from lightning_ptdp.cli.failures import UserError
from lightning_ptdp.schedule.actions import Schedule
from lightning_ptdp.schedule.generators import SCHEDULES, build_schedule
from lightning_ptdp.schedule.schedule_timeline import draw_timelines
from lightning_ptdp.schedule.simulate import Costs, simulate
from lightning_ptdp.schedule.spans import Timeline, chrome_trace

_DESCRIPTION = """\
Simulate pipeline schedules. Print step time, bubble and held activations, and draw them above each other.

Durations are those of one microbatch through all layers of a rank. With v chunks per rank, each chunk takes 1/v of them, so
that schedules with different numbers of chunks are comparable. If a schedule splits the backward, the weight gradient
takes --weight of the --backward, and the input gradient takes the rest."""

_SUFFIXES = (".png", ".json")
_MOST = 1_000_000
"""Number of forwards in a schedule that takes a minute to simulate."""


def run(verb: str, arguments: list[str]) -> int:
    """Run ``ptdp timeline``: simulate, print a table, write the pictures and traces.

    Raises:
        SystemExit: An argument is invalid. The message names it and the reason.
        UserError: A picture is requested, and matplotlib is missing. Or an output is a folder.
        ValueError: An output cannot be written.
    """
    parser = _parser(f"ptdp {verb}")
    options = parser.parse_args(arguments)
    outputs = options.output or [Path("timeline.png"), Path("timeline.json")]
    for output in outputs:
        if output.suffix not in _SUFFIXES:
            parser.error(f"--output {output} must end in .png or .json")
        check_output(output)
    if options.pp * options.microbatches > _MOST:
        parser.error(
            f"--pp {options.pp} * --microbatches {options.microbatches} must be at most {_MOST:,}"
        )
    try:
        timelines = [_simulated(name, options) for name in options.compare or [options.schedule]]
    except ValueError as error:
        parser.error(str(error))
    print(_table(timelines))
    for output in outputs:
        output.parent.mkdir(parents=True, exist_ok=True)
        _write(timelines, output, options)
        print(f"written: {output}")
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(SCHEDULES)
    parser.add_argument("--pp", type=int, required=True, metavar="P", help="pipeline_parallel_size")
    parser.add_argument(
        "--vpp",
        type=int,
        metavar="V",
        help="virtual_pipeline_size (default: the least that the schedule supports)",
    )
    parser.add_argument(
        "--microbatches", type=int, required=True, metavar="M", help="num_microbatches"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--schedule", default="auto", help=f"one of {names}, or a .csv file (default auto)"
    )
    group.add_argument(
        "--compare",
        type=listed,
        metavar="A,B,…",
        help="several schedules in one picture, separated by commas",
    )
    parser.add_argument(
        "--forward", type=float, default=1.0, help="duration of a forward (default 1)"
    )
    parser.add_argument(
        "--backward", type=float, default=2.0, help="duration of a complete backward (default 2)"
    )
    parser.add_argument(
        "--weight",
        type=float,
        help="duration of the weight gradient within the backward (default half of it)",
    )
    parser.add_argument(
        "--reduce",
        type=float,
        default=0.0,
        help="duration of the reduction of a rank's gradients (default 0)",
    )
    parser.add_argument(
        "--latency", type=float, default=0.0, help="duration of a message (default 0)"
    )
    parser.add_argument(
        "--memory", action="store_true", help="also draw the activations that each rank holds"
    )
    parser.add_argument(
        "--width", type=int, default=1600, help="width of the picture in pixels (default 1600)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        action="append",
        metavar="FILE",
        help="a .png, or a .json for https://ui.perfetto.dev; may be repeated (default: "
        "timeline.png and timeline.json)",
    )
    return parser


def _simulated(name: str, options: argparse.Namespace) -> Timeline:
    weight = options.backward / 2 if options.weight is None else options.weight
    if options.weight is not None and not 0 <= weight <= options.backward:
        raise ValueError(
            f"--weight {weight:g} must be between 0 and --backward {options.backward:g}, "
            "because it is a part of it"
        )
    schedule = _schedule(name, options)
    v = schedule.virtual_pipeline_size
    costs = Costs(
        forward=options.forward / v,
        backward=(options.backward - (weight if schedule.splits_backward else 0)) / v,
        weight=weight / v,
        reduce=options.reduce / v,
        latency=options.latency,
    )
    return simulate(schedule, costs)


def _schedule(name: str, options: argparse.Namespace) -> Schedule:
    """Return the schedule. Without ``--vpp``, it has as many chunks as it needs.

    An error is that of the last attempt.
    """
    needed = (1, options.vpp or 2, 2)
    tries = needed if options.compare or options.vpp is None else (options.vpp,)
    for chunks in tries:
        try:
            return build_schedule(
                name,
                pipeline_parallel_size=options.pp,
                virtual_pipeline_size=chunks,
                num_microbatches=options.microbatches,
            )
        except ValueError as error:
            mistake = error
    raise mistake


def _table(timelines: Sequence[Timeline]) -> str:
    """Return a table with one row per schedule.

    The activations of a rank are counted in microbatches through all its layers.
    """
    head = ("schedule", "v", "step time", "bubble", "activations held, by rank")
    rows = [head]
    for timeline in timelines:
        v = timeline.schedule.virtual_pipeline_size
        peaks = " ".join(f"{peak / v:g}" for peak in timeline.peak_in_flight)
        bubble = f"{float(timeline.bubble_fraction):.2%}"
        rows.append(
            (timeline.schedule.name, str(v), f"{float(timeline.step_time):g}", bubble, peaks)
        )
    return columns(rows, words=(0, 4))


def _write(timelines: Sequence[Timeline], path: Path, options: argparse.Namespace) -> None:
    if path.suffix == ".json":
        path.write_text(json.dumps(chrome_trace(*timelines)))
        return
    try:
        draw_timelines(timelines, path, width=options.width, memory=options.memory)
    except ModuleNotFoundError as error:
        raise UserError(f"{error}. Or write only a trace: --output timeline.json") from error
