"""The verb ``ptdp timeline``: pictures, traces and numbers of pipeline schedules.

The schedules are simulated; nothing is run.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from lightning_ptdp.base.output import columns
from lightning_ptdp.cli.command_line import VerbOption, check_output, listed, positive, verb_parser
from lightning_ptdp.schedule.actions import Schedule
from lightning_ptdp.schedule.generators import SCHEDULES, build_schedule
from lightning_ptdp.schedule.schedule_timeline import chrome_trace, draw_timelines
from lightning_ptdp.schedule.simulate import Costs, Timeline, simulate

_DESCRIPTION = """\
Simulate pipeline schedules. Print step time, bubble and held activations, and draw them above each other.

Durations are those of one microbatch through all layers of a rank. With v chunks per rank, each chunk takes 1/v of them, so
that schedules with different numbers of chunks are comparable. If a schedule splits the backward, the weight gradient
takes --weight of the --backward, and the input gradient takes the rest."""

_OPTIONS = (
    VerbOption("pp", int, "pipeline_parallel_size", required=True),
    VerbOption("microbatches", int, "num_microbatches", required=True),
    VerbOption(
        "vpp",
        int,
        "virtual_pipeline_size (default: the least that the schedule supports)",
    ),
    VerbOption("forward", float, "duration of a forward (default 1)", 1.0),
    VerbOption("backward", float, "duration of a complete backward (default 2)", 2.0),
    VerbOption(
        "weight",
        float,
        "duration of the weight gradient within the backward (default half of it)",
    ),
    VerbOption("reduce", float, "duration of the reduction of a rank's gradients (default 0)", 0.0),
    VerbOption("latency", float, "duration of a message (default 0)", 0.0),
    VerbOption("memory", None, "also draw the activations that each rank holds"),
    VerbOption("width", positive, "width of the picture in pixels (default 1600)", 1600),
    VerbOption(
        "output",
        list[Path],
        "a .png, or a .json for https://ui.perfetto.dev; may be repeated (default: "
        "timeline.png and timeline.json)",
    ),
)
_SUFFIXES = (".png", ".json")
_MOST = 1_000_000
"""Number of forwards in a schedule that takes a minute to simulate."""


def run(verb: str, arguments: list[str]) -> int:
    """Run ``ptdp timeline``: simulate, print a table, write the pictures and traces.

    Raises:
        SystemExit: An argument is invalid. The message names it and the reason.
        UserError: An output is a folder.
        ValueError: An output cannot be written.
    """
    parser = _parser(verb)
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


def _parser(verb: str) -> ArgumentParser:
    parser = verb_parser(verb, _DESCRIPTION, _OPTIONS)
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--schedule",
        default="auto",
        help=f"one of {', '.join(SCHEDULES)}, or a .csv file (default auto)",
    )
    group.add_argument(
        "--compare",
        type=listed,
        metavar="A,B,…",
        help="several schedules in one picture, separated by commas",
    )
    return parser


def _simulated(name: str, options: Namespace) -> Timeline:
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


def _schedule(name: str, options: Namespace) -> Schedule:
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
            last_error = error
    raise last_error


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


def _write(timelines: Sequence[Timeline], path: Path, options: Namespace) -> None:
    if path.suffix == ".json":
        path.write_text(json.dumps(chrome_trace(*timelines)))
    else:
        draw_timelines(timelines, path, width=options.width, memory=options.memory)
