"""The verb ``ptdp plan``: a search for the best layouts of a model on given devices.

Memory and time are estimated; nothing is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning_ptdp.base.output import columns
from lightning_ptdp.cli.command_line import (
    VerbOption,
    add_options,
    check_picture,
    integers,
    listed,
    positive,
    verb_parser,
)
from lightning_ptdp.cli.config_files import find_config, resolve_config
from lightning_ptdp.cli.failures import UserError
from lightning_ptdp.cli.planned_job import SIZES, planned_job
from lightning_ptdp.world.axes import AXES
from lightning_ptdp.world.layout import Sharding

if TYPE_CHECKING:
    from lightning_ptdp.planner import Candidate, Job, Space


_DESCRIPTION = """\
Estimate memory and time of every layout that fits, and print the best ones with the options of the strategy.

The model is that of a recipe or a configuration file, any LightningModule, or is given by sizes, which override those of the file. Times
are estimates from published figures of a device, or from measurements (ptdp doctor --calibrate). To measure the best, use ptdp bench."""

_EPILOG = """\
examples:
  ptdp plan --recipe gpt/nano --world 8 --device cpu
  ptdp plan --model mixtral-8x7b --world 64 --batch 256 --ep 2,4,8 --device h100
  ptdp plan --layers 48 --hidden 8192 --heads 64 --vocabulary 51200 --sequence 2048 --world 512 --batch 1536 --device a100"""

_MODEL_OPTIONS = (
    *(VerbOption(name, positive, text, dest=field) for name, (field, text) in SIZES.items()),
    VerbOption(
        "llama",
        None,
        "use the Llama architecture: RMSNorm, rotary positions, SwiGLU, untied head",
    ),
)
_JOB_OPTIONS = (
    VerbOption("world", positive, "number of processes, one per device", required=True),
    VerbOption(
        "batch",
        positive,
        "sequences per optimizer step, over all replicas (default: that of the file)",
    ),
    VerbOption(
        "device",
        str,
        "v100, a100, a100-40gb, a100-pcie, h100, h200, b200, cpu or a file of ptdp "
        "doctor --calibrate (default: ptdp-machine.json if it is in the current folder, else h100)",
    ),
    VerbOption(
        "memory",
        float,
        "GiB per device that training can use (default: that of the device)",
    ),
    VerbOption(
        "reserve",
        float,
        "share of this memory to leave free, because measured values exceed the estimate "
        "by up to 23 %% (default 0.2)",
    ),
    VerbOption(
        "imbalance", float, "rows of the busiest rank's experts, over the mean (default 1)", 1.0
    ),
    VerbOption("node-size", positive, "devices per node (default: that of the device)"),
    VerbOption("cards", positive, "network cards per node (default: that of the device)"),
    VerbOption(
        "software",
        str,
        "ours, ours-compiled (with compile=blocks), megatron-2021, megatron-2022, "
        "megatron-2024, fsdp2, fsdp2-compiled, fsdp2-fp8 or deepspeed-zero3 (default ours)",
        "ours",
    ),
    VerbOption(
        "precision",
        str,
        "Lightning's precision (default: that of the file, else bf16-true, on a CPU 32-true)",
    ),
)
# option -> field of Space
_SIZES_OF_SPACE = {
    **{f"{axis.letter}p": f"{axis.name}_parallel_sizes" for axis in AXES},
    "etp": "expert_tensor_parallel_sizes",
    "vpp": "virtual_pipeline_sizes",
    "micro-batch": "micro_batch_sizes",
}
_SPACE_OPTIONS = (
    *(VerbOption(name, integers, field, dest=field) for name, field in _SIZES_OF_SPACE.items()),
    VerbOption("schedule", listed, "pipeline schedules", dest="schedules"),
    VerbOption(
        "cp-attention",
        listed,
        "ring, all_to_all (default: all)",
        dest="context_parallel_attentions",
    ),
    VerbOption("recompute", listed, "none, selective, full (default none,full)"),
    VerbOption("sequence-parallel", Literal["yes", "no"], "default: wherever possible"),
    VerbOption("shard", Sharding, "default: what is necessary"),
)
_OUTPUT_OPTIONS = (
    VerbOption("top", positive, "number of layouts (default 8)", 8),
    VerbOption("explain", None, "explain why the others were rejected"),
    VerbOption(
        "picture",
        Path,
        "file for a plot of time and memory of the best layouts, as PNG, PDF or SVG",
    ),
    VerbOption(
        "what-if",
        str,
        "print the best layout for each of several sizes: batch=256,512,gpus=64,128; "
        "with --picture as a plot",
    ),
    VerbOption("json", None, "print the output as JSON"),
)


def run(verb: str, arguments: list[str]) -> int:
    """Run ``ptdp plan``.

    Raises:
        UserError: The configuration has no model that can be planned, or no layout fits.
        ValueError: A size, device, precision or schedule is invalid.
    """
    options = _parser(verb).parse_args(arguments)
    config = (
        resolve_config(find_config(options.config)).values if options.config is not None else {}
    )
    # Imported here because these modules import torch, which takes seconds.
    from lightning_ptdp.planner import search
    from lightning_ptdp.planner.picture import draw
    from lightning_ptdp.planner.plan_report import as_data, explain_rejected, table
    from lightning_ptdp.planner.search import why_nothing_fits

    _refuse_ignored(options)
    check_picture("--picture", options.picture)
    job = planned_job(options, config)
    space = _space(options)
    if options.what_if is not None:
        return _what_if(job, space, options)
    plan = search(job, space, count=options.top)
    if options.json:
        print(json.dumps(as_data(plan), indent=2))
        return 0 if plan.best else 2
    if plan.best:
        print(table(plan))
    if options.explain:
        print(f"\n{explain_rejected(plan)}")
    if not plan.best:
        raise UserError(why_nothing_fits(plan, space))
    if options.picture is not None:
        with _drawing(options.picture):
            draw(plan, options.picture)
    return 0


def _refuse_ignored(options: Namespace) -> None:
    """Refuse options that would have no effect."""
    if options.json and (options.picture is not None or options.what_if is not None):
        raise UserError(
            "--json prints the plan as data. Leave out --picture and --what-if, or leave out --json"
        )
    if options.explain and options.what_if is not None:
        raise UserError("--explain needs one size. Leave out --what-if")
    source = options.config or options.model
    if options.llama and source:
        raise UserError(
            f"--llama applies to a model that is given by its sizes, but {source} determines "
            "the model. Leave out one of them"
        )


def _what_if(job: Job, space: Space, options: Namespace) -> int:
    """Print the best layout for each batch and number of devices."""
    from lightning_ptdp.planner import search
    from lightning_ptdp.planner.picture import draw_what_if

    sizes = _parsed_sizes(options.what_if)
    jobs = [
        dataclasses.replace(job, global_batch_size=batch, world_size=world)
        for batch in sizes.get("batch", [job.global_batch_size])
        for world in sizes.get("gpus", [job.world_size])
    ]
    best_by_batch: dict[int, list[tuple[int, Candidate]]] = {}
    rows: list[tuple[str, ...]] = [
        ("devices", "batch", "layout", "b", "m", "step s", "tokens/s", "MFU", "memory GiB")
    ]
    for case in jobs:
        size = (str(case.world_size), str(case.global_batch_size))
        best = next(iter(search(case, space, count=options.top).best), None)
        if best is None:
            rows.append((*size, "none fits", *[""] * 6))
            continue
        best_by_batch.setdefault(case.global_batch_size, []).append((case.world_size, best))
        choice = best.choice
        time = best.time
        rows.append(
            (
                *size,
                choice.describe(),
                str(choice.micro_batch_size),
                str(choice.num_microbatches),
                f"{time.total:.3g}",
                f"{case.tokens / time.total:.4g}",
                f"{time.mfu:.1%}",
                f"{best.memory.total / 2**30:.3g}",
            )
        )
    print(columns(rows, words=(2,)))
    if not best_by_batch:
        raise UserError(
            "no layout fits in any of these cases. For the reasons, use --explain without --what-if"
        )
    if options.picture is not None:
        with _drawing(options.picture):
            draw_what_if(
                best_by_batch,
                options.picture,
                tokens={batch: batch * job.sequence_length for batch in best_by_batch},
            )
    return 0


def _parsed_sizes(text: str) -> dict[str, list[int]]:
    """Return ``batch=256,512,gpus=64,128`` as {"batch": [256, 512], "gpus": [64, 128]}."""
    sizes: dict[str, list[int]] = {}
    name = ""
    for part in text.split(","):
        key, equals, value = part.rpartition("=")
        name = key.strip() if equals else name
        if name not in ("batch", "gpus") or not value.strip().isdecimal() or int(value) == 0:
            raise UserError(
                f"--what-if {text!r} is invalid. Give numbers of batch or gpus, such as "
                "batch=256,512,gpus=64,128"
            )
        sizes.setdefault(name, []).append(int(value))
    return sizes


@contextlib.contextmanager
def _drawing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError(f"--picture {path} cannot be written: {error}") from error
    print(f"\n{path}")


def _parser(verb: str) -> ArgumentParser:
    parser = verb_parser(verb, _DESCRIPTION, epilog=_EPILOG)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--recipe", dest="config", metavar="NAME", help="a recipe (ptdp recipes list)"
    )
    source.add_argument("--config", "-c", metavar="FILE", help="a configuration of ptdp fit")
    source.add_argument(
        "--model",
        metavar="FOLDER",
        help="a Hugging Face model: a folder or a name on the hub, of which only config.json "
        "is read",
    )
    add_options(parser, _MODEL_OPTIONS, group="the model")
    add_options(parser, _JOB_OPTIONS, group="the job")
    title = "the search space; several values separated by commas"
    add_options(parser, _SPACE_OPTIONS, group=title)
    add_options(parser, _OUTPUT_OPTIONS, group="the output")
    return parser


def _space(options: Namespace) -> Space:
    from lightning_ptdp.planner import Space

    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(Space)}
    values["sequence_parallel"] = {"yes": True, "no": False}.get(options.sequence_parallel)
    values["shard"] = (options.shard,) if options.shard else None
    return Space(**{field: value for field, value in values.items() if value is not None})
