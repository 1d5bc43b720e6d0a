"""``ptdp plan``: the best layouts for a model and a number of devices, estimated without running anything."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ptdp.cli.command_line import listed
from lightning_ptdp.cli.errors import UserError, nearest
from lightning_ptdp.cli.inheritance import resolve_config
from lightning_ptdp.cli.recipe_files import find_config
from lightning_ptdp.columns import columns
from lightning_ptdp.world.layout import AXES

if TYPE_CHECKING:
    from lightning_ptdp.models.config import GPTConfig
    from lightning_ptdp.planner import Candidate, Device, Job, ModelShape, Space

__all__ = ["run"]

_DESCRIPTION = """\
Estimate memory and time of every layout that fits, and print the best with the strategy options to paste.

The model is that of a recipe or a configuration file, any LightningModule, or is given by its sizes, which change those of the file. Times
are estimates from data sheets: trust the order more than the numbers, and measure the first few with ptdp fit."""

_EPILOG = """\
examples:
  ptdp plan --recipe gpt/nano --world 8 --device cpu
  ptdp plan --model mixtral-8x7b --world 64 --batch 256 --ep 2,4,8 --device h100
  ptdp plan --layers 48 --hidden 8192 --heads 64 --vocabulary 51200 --sequence 2048 --world 512 --batch 1536 --device a100"""

# option: (GPTConfig's field, what it is)
_SIZES = {
    "layers": ("num_layers", "l, transformer layers"),
    "hidden": ("hidden_size", "h, width of the residual stream"),
    "heads": ("num_heads", "attention heads"),
    "kv-heads": ("num_kv_heads", "heads of keys and values"),
    "ffn": ("ffn_hidden_size", "f, inner width of the feed-forward part"),
    "vocabulary": ("vocabulary_size", "V, token ids"),
    "sequence": ("sequence_length", "s, tokens of a sequence"),
    "experts": ("num_experts", "E, experts of a layer; with it, the Llama layout"),
    "experts-per-token": ("experts_per_token", "k, of them a token visits"),
    "shared-experts": ("shared_experts", "experts that all tokens visit"),
    "expert-ffn": ("expert_hidden_size", "inner width of an expert"),
    "dense-layers": ("dense_layers", "the first layers, without experts"),
}
# option: Space's field
_SPACE = {
    **{f"{axis.letter}p": f"{axis.name}_parallel_sizes" for axis in AXES},
    "etp": "expert_tensor_parallel_sizes",
    "vpp": "virtual_pipeline_sizes",
    "micro-batch": "micro_batch_sizes",
}


def run(verb: str, arguments: list[str]) -> int:
    """Run ``ptdp plan``.

    Raises:
        UserError: The configuration holds no model that can be planned, or no layout fits.
        ValueError: A size, device, precision or schedule makes no sense.
    """
    options = _parser(f"ptdp {verb}").parse_args(arguments)
    config = resolve_config(find_config(options.config)).values if options.config is not None else {}
    # Imported here, since they take the seconds that an import of torch takes.
    from lightning_ptdp.planner import search
    from lightning_ptdp.planner.mends import why_nothing_fits
    from lightning_ptdp.planner.picture import draw
    from lightning_ptdp.planner.report import as_data, explain_rejected, table

    job, space = _job(options, config), _space(options)
    if options.what_if:
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


def _what_if(job: Job, space: Space, options: argparse.Namespace) -> int:
    """The best layout for each batch and number of devices."""
    from lightning_ptdp.planner import search
    from lightning_ptdp.planner.picture import draw_what_if

    wishes = _wishes(options.what_if)
    jobs = [
        dataclasses.replace(job, global_batch_size=batch, world_size=world)
        for batch in wishes.get("batch", [job.global_batch_size])
        for world in wishes.get("gpus", [job.world_size])
    ]
    found: dict[int, list[tuple[int, Candidate]]] = {}
    rows: list[tuple[str, ...]] = [("devices", "batch", "layout", "b", "m", "step s", "tokens/s", "MFU", "memory GiB")]
    for one in jobs:
        size = (str(one.world_size), str(one.global_batch_size))
        best = next(iter(search(one, space, count=options.top).best), None)
        if best is None:
            rows.append((*size, "none fits", *[""] * 6))
            continue
        found.setdefault(one.global_batch_size, []).append((one.world_size, best))
        choice, time = best.choice, best.time
        cells = (f"{time.total:.3g}", f"{one.tokens / time.total:.4g}", f"{time.mfu:.1%}", f"{best.memory.total / 2**30:.3g}")
        rows.append((*size, choice.describe(), str(choice.micro_batch_size), str(choice.num_microbatches), *cells))
    print(columns(rows, words=(2,)))
    if not found:
        raise UserError("no layout fits in any of these cases; --explain without --what-if says why")
    if options.picture is not None:
        with _drawing(options.picture):
            draw_what_if(found, options.picture, tokens={batch: batch * job.sequence_length for batch in found})
    return 0


def _wishes(text: str) -> dict[str, list[int]]:
    """``batch=256,512,gpus=64,128`` -> {"batch": [256, 512], "gpus": [64, 128]}."""
    wishes: dict[str, list[int]] = {}
    name = ""
    for part in text.split(","):
        key, equals, value = part.rpartition("=")
        name = key.strip() if equals else name
        if name not in ("batch", "gpus") or not value.strip().isdigit():
            raise UserError(f"--what-if {text!r}: write numbers of batch or gpus, such as batch=256,512,gpus=64,128")
        wishes.setdefault(name, []).append(int(value))
    return wishes


@contextlib.contextmanager
def _drawing(path: Path) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"--picture {path} needs {error.name}: pip install {error.name}, or leave it out") from error
    except (OSError, ValueError) as error:
        raise UserError(f"--picture {path} cannot be written: {error}") from error
    print(f"\n{path}")


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_argument_group("the model")
    source = model.add_mutually_exclusive_group()
    source.add_argument("--recipe", dest="config", metavar="NAME", help="a recipe (ptdp recipes list)")
    source.add_argument("--config", "-c", metavar="FILE", help="a configuration of ptdp fit")
    source.add_argument("--model", metavar="FOLDER", help="a model of Hugging Face's, of which config.json is read")
    for name, (field, text) in _SIZES.items():
        model.add_argument(f"--{name}", dest=field, type=int, metavar="N", help=text)
    model.add_argument("--llama", action="store_true", help="the Llama layout: RMSNorm, rotary positions, SwiGLU, own head")

    job = parser.add_argument_group("the job")
    job.add_argument("--world", type=int, required=True, metavar="N", help="number of processes, one a device")
    job.add_argument(
        "--batch", type=int, metavar="B", help="sequences in an optimizer step, over all replicas (default: the file's)"
    )
    job.add_argument(
        "--device",
        help="v100, a100, a100-40gb, a100-pcie, h100, h200, b200, cpu or a file of ptdp doctor --calibrate (default: ptdp-machine.json if "
        "it is here, else h100)",
    )
    job.add_argument(
        "--memory", type=float, metavar="GIB", help="memory of a device that training can use (default: the device's)"
    )
    job.add_argument(
        "--imbalance",
        type=float,
        default=1.0,
        metavar="X",
        help="rows that the busiest rank's experts get, over the mean (default 1)",
    )
    job.add_argument("--node-size", type=int, metavar="N", help="devices of a node (default: the device's)")
    job.add_argument("--cards", type=int, metavar="N", help="network cards of a node (default: the device's)")
    job.add_argument(
        "--software",
        default="ours",
        help="ours, ours-compiled (with compile=blocks), megatron-2021, megatron-2022 or megatron-2024 (default ours)",
    )
    job.add_argument("--precision", help="Lightning's precision (default: the file's, else bf16-true, on a CPU 32-true)")

    space = parser.add_argument_group("what is tried; several values separated by commas")
    for name, field in _SPACE.items():
        space.add_argument(f"--{name}", dest=field, type=_integers, metavar="N,…", help=field)
    space.add_argument("--schedule", dest="schedules", type=listed, metavar="NAME,…", help="pipeline schedules")
    space.add_argument("--recompute", type=listed, metavar="NAME,…", help="none, selective, full (default none,full)")
    space.add_argument("--sequence-parallel", choices=("yes", "no"), help="default: wherever it can be")
    space.add_argument("--shard-optimizer", choices=("yes", "no"), help="default: where it must be")

    shown = parser.add_argument_group("what is printed")
    shown.add_argument("--top", type=int, default=8, metavar="N", help="how many of the best (default 8)")
    shown.add_argument("--explain", action="store_true", help="why the others were rejected")
    shown.add_argument("--picture", type=Path, metavar="FILE", help="where time and memory of the best go, as PNG, PDF or SVG")
    shown.add_argument(
        "--what-if",
        metavar="LIST",
        help="the best layout for each of several sizes: batch=256,512,gpus=64,128; with --picture as a plot",
    )
    shown.add_argument("--json", action="store_true", help="all of it as JSON")
    return parser


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _job(options: argparse.Namespace, config: Mapping[str, Any]) -> Job:
    from lightning_ptdp.planner import Job, find_precision, find_software

    trainer = config.get("trainer") or {}
    device = _device(options)
    precision = str(options.precision or trainer.get("precision") or ("32-true" if device.kind == "cpu" else "bf16-true"))
    model: GPTConfig | ModelShape
    if _is_foreign(options, config):
        model = _followed(options, config, device=device, precision=precision)
    else:
        model = _model(options, config)
    return Job(
        model=model,
        world_size=options.world,
        global_batch_size=_batch(options, config),
        device=device,
        precision=find_precision(precision),
        software=find_software(options.software),
        sequence_length=min(model.sequence_length, _inner(config, "data").get("sequence_length") or model.sequence_length),
        imbalance=options.imbalance,
    )


def _is_foreign(options: argparse.Namespace, config: Mapping[str, Any]) -> bool:
    """Whether the configuration names a class of somebody's, of which no sizes are given."""
    given = {field for field, _ in _SIZES.values() if getattr(options, field) is not None} - {"sequence_length"}
    path = str((config.get("model") or {}).get("class_path", ""))
    return "." in path and not path.startswith("lightning_ptdp.") and not given


def _followed(
    options: argparse.Namespace, config: Mapping[str, Any], *, device: Device, precision: str
) -> GPTConfig | ModelShape:
    """The configuration's LightningModule, built without values, as its forward is without data."""
    import torch
    from jsonargparse import ArgumentError, ArgumentParser
    from lightning.pytorch import LightningModule

    from lightning_ptdp.config import PTDPConfig
    from lightning_ptdp.strategy.checks.model import whole_model
    from lightning_ptdp.strategy.planning import described

    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    given = {"model": {key: value for key, value in config["model"].items() if key in ("class_path", "init_args")}}
    try:
        parsed = parser.parse_object(given)
        with torch.device("meta"):
            module = parser.instantiate_classes(parsed).model
        whole = whole_model(module, PTDPConfig())
    except (ArgumentError, ImportError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise UserError(f"{options.config}: {config['model']['class_path']} cannot be built without values: {reason}") from error
    length = options.sequence_length or _inner(config, "data").get("sequence_length")
    return described(whole, PTDPConfig(), length=length, precision=precision, software=options.software, device=device)


def _model(options: argparse.Namespace, config: Mapping[str, Any]) -> GPTConfig:
    from lightning_ptdp.models.config import BertConfig, GPTConfig
    from lightning_ptdp.models.folder import config_of_sizes
    from lightning_ptdp.planner import gpt_sizes

    given = {field: getattr(options, field) for field, _ in _SIZES.values() if getattr(options, field) is not None}
    inner = _inner(config, "model")
    folder = options.model or (inner.get("path") if inner.get("config") is None else None)
    if folder is not None:
        return dataclasses.replace(_of_folder(Path(str(folder))), **given)
    if not config:
        missing = [f"--{name}" for name in ("layers", "hidden", "heads", "sequence") if _SIZES[name][0] not in given]
        if missing:
            raise UserError(f"there is no model: give --recipe, --config or --model, or also {', '.join(missing)}")
        return GPTConfig.llama(**given) if options.llama or "num_experts" in given else GPTConfig.gpt2(**given)
    sizes = inner.get("config")
    if sizes is None and all(_SIZES[name][0] in given for name in ("layers", "hidden", "heads", "sequence")):
        return GPTConfig.llama(**given) if options.llama else GPTConfig.gpt2(**given)
    if str((config.get("model") or {}).get("class_path", "")).endswith("LitBert"):
        print("ptdp: LitBert is planned as a GPT of the same sizes", file=sys.stderr)
        return dataclasses.replace(gpt_sizes(BertConfig(**sizes or {})), **given)
    if isinstance(sizes, Mapping) and "model_type" in sizes:
        return dataclasses.replace(gpt_sizes(config_of_sizes(sizes).to_dict()), **given)
    known = [field.name for field in dataclasses.fields(GPTConfig)]
    if not isinstance(sizes, Mapping):
        raise UserError(
            f"{options.config} has no model.init_args.config: give the sizes as options, such as --layers 24 --hidden 2048"
        )
    for name in sizes:
        if name not in known:
            raise UserError(f"{options.config}: model.config.{name} is not one of a GPT's sizes{nearest(name, known)}")
    return GPTConfig(**{**sizes, **given})


def _of_folder(folder: Path) -> GPTConfig:
    """The sizes of a model of Hugging Face's, of which only ``config.json`` is read."""
    from lightning_ptdp.planner import gpt_sizes

    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} has no config.json of a Hugging Face model ({type(error).__name__}): give the sizes as options, such as "
            "--layers 24 --hidden 2048 --heads 16 --sequence 2048"
        ) from error
    if not isinstance(values, Mapping):
        raise UserError(f"{path} holds no mapping: it is none of a Hugging Face model")
    try:
        return gpt_sizes(values)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _batch(options: argparse.Namespace, config: Mapping[str, Any]) -> int:
    """Sequences in a step: as given, or those of the file's data and as many replicas as its trainer has."""
    if options.batch is not None:
        return int(options.batch)
    data = _inner(config, "data")
    if "micro_batch_size" not in data:
        raise UserError("how large is a step? Give --batch, the number of sequences over all replicas")
    trainer, layout = config.get("trainer") or {}, _inner(config.get("trainer") or {}, "strategy")
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes", 1)
    replica = math.prod(
        layout.get(f"{axis.name}_parallel_size", 1) for axis in AXES if axis.name != "data" and axis.within is None
    )
    replicas = max(1, devices * nodes // replica) if isinstance(devices, int) else 1
    accumulated = trainer.get("accumulate_grad_batches", 1)
    return int(data["micro_batch_size"] * data.get("num_microbatches", 1) * replicas * accumulated)


def _device(options: argparse.Namespace) -> Device:
    from lightning_ptdp.planner import MACHINE_FILE, find_device, load_calibration

    name = options.device or (str(MACHINE_FILE) if MACHINE_FILE.is_file() else "h100")
    if name.endswith(".json"):
        calibration = load_calibration(Path(name))
        device = calibration.device
        if doubt := calibration.doubt():
            print(f"ptdp: {name} {doubt}", file=sys.stderr)
    else:
        device = find_device(name)
    if options.memory is not None:
        device = dataclasses.replace(device, memory_bytes=options.memory * 2**30, reserved_bytes=0.0)
    given = {name: getattr(options, name) for name in ("node_size", "cards") if getattr(options, name) is not None}
    return dataclasses.replace(device, cluster=dataclasses.replace(device.cluster, **given)) if given else device


def _space(options: argparse.Namespace) -> Space:
    from lightning_ptdp.planner import Space

    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Space)}
    given["sequence_parallel"] = {"yes": True, "no": False}.get(options.sequence_parallel)
    given["shard_optimizer"] = {"yes": (True,), "no": (False,)}.get(options.shard_optimizer)
    return Space(**{field: value for field, value in given.items() if value is not None})


def _inner(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """``config[key]``'s ``init_args``, or nothing."""
    part = config.get(key)
    arguments = part.get("init_args") if isinstance(part, Mapping) else None
    return arguments if isinstance(arguments, Mapping) else {}
