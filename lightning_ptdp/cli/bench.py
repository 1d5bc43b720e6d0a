"""The verb ``ptdp bench``: timed training steps of one or several layouts.

The steps run on synthetic data and without loggers.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from lightning_ptdp.bench import BenchResult, StepTimes, SyntheticData, ranked, render, table
from lightning_ptdp.cli.failures import UserError, ending_workers, held_back
from lightning_ptdp.cli.lightning_cli import PTDPCLI
from lightning_ptdp.cli.run_checks import check_run
from lightning_ptdp.data import StreamDataModule
from lightning_ptdp.world.axes import AXES
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.rendezvous_address import launched_processes

# Long enough for any learning-rate schedule. The ``StepTimes`` callback ends the fit.
_MANY_STEPS = 10**6
_DEGREES = {axis.letter: f"{axis.name}_parallel_size" for axis in AXES if axis.name != "data"} | {
    "v": "virtual_pipeline_size"
}


class _BenchCLI(PTDPCLI):
    """A configuration reduced to the training step."""

    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        config = self.config
        for name, minimum in (("warmup", 1), ("steps", 1)):
            if config[name] < minimum:
                raise UserError(f"--{name} {config[name]} must be at least {minimum}")
        if config.peak_tflops is not None and config.peak_tflops <= 0:
            raise UserError(f"--peak_tflops {config.peak_tflops:g} must be greater than 0")
        config.seed_everything = config.seed_everything or 1
        quiet = {
            "logger": False,
            "callbacks": None,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "val_check_interval": None,
            "max_epochs": -1,
            "max_steps": _MANY_STEPS,
            "max_time": None,
        }
        for name, value in quiet.items():
            config[f"trainer.{name}"] = value


def run(verb: str, arguments: list[str]) -> int:
    """Run ``ptdp bench``.

    Raises:
        ValueError: The configuration cannot work.
    """
    for message in (".*LeafSpec.*", ".*validation_step. but have no .val_dataloader.*"):
        warnings.filterwarnings("ignore", message=message)
    with held_back():
        cli = _BenchCLI(verb, arguments)
        world = cli.trainer.num_devices * cli.trainer.num_nodes
        layouts = [
            layout_options(text, world)
            for text in (cli.config.compare or "").split(",")
            if text.strip()
        ]
        if cli.config.compare is not None and not layouts:
            raise UserError("--compare has no layout. Use a form like 't2 p2, d4', or leave it out")
        if layouts and launched_processes(os.environ) is not None:
            raise UserError(
                "--compare starts the processes of each layout by itself, but a launcher such as "
                "torchrun has started this one. Run it without the launcher, or leave --compare out"
            )
        data = (
            SyntheticData(cli.datamodule)
            if isinstance(cli.datamodule, StreamDataModule)
            else cli.datamodule
        )
        check_run(cli.trainer, cli.model, data, ckpt_path=None, writes=False)
    result = _measure(cli, data)
    if result is None:  # another rank prints the result
        return 0
    options: dict[str, list[str]] = {result.layout: []}
    results = [result]
    failed = []
    for layout in layouts:
        overrides = {f"trainer.strategy.{name}": value for name, value in layout.items()}
        overrides |= _same_batch(cli, result.samples, layout, world)
        flags = [f"--{name}={json.dumps(value)}" for name, value in overrides.items()]
        try:
            results.append(_measure_elsewhere(arguments, flags))
            options[results[-1].layout] = flags
        except UserError as error:
            failed.append(f"ptdp: {error}")
    results = ranked(results)
    if cli.config.json:
        print(json.dumps([entry.as_dict() for entry in results]), flush=True)
    elif len(results) == 1:
        print(render(result), flush=True)
    else:
        best = (
            " ".join(options[results[0].layout])
            or "nothing, because it is the configuration's own layout"
        )
        print(f"{table(results)}\n\nto use 1, add:\n  {best}", flush=True)
    print(*failed, sep="\n", end="\n" if failed else "", file=sys.stderr, flush=True)
    return 2 if failed else 0


def layout_options(text: str, world_size: int) -> dict[str, int | bool]:
    """Return a layout as options of the strategy.

    Args:
        text: The layout as ``"t2 p2 v2"``, or as listings print it: ``"t2 p2 v2 d1"``.
        world_size: Number of processes.

    Raises:
        UserError: ``text`` is not a layout of ``world_size`` processes.
    """
    text = text.strip()
    words = text.split()
    degrees = {}
    for word in words:
        match = re.fullmatch(rf"([d{''.join(_DEGREES)}])([1-9]\d*)", word)
        if match is not None:
            degrees[match[1]] = int(match[2])
        elif word != "sp":
            raise UserError(
                f"--compare {text!r}: {word!r} is not a degree. Use a form like 't2 p2 v2' "
                "(or c2, sp)"
            )
    chosen = {option: degrees.get(letter, 1) for letter, option in _DEGREES.items()}
    try:
        layout = ParallelLayout.chosen(chosen, world_size=world_size)
    except ValueError as error:
        raise UserError(f"--compare {text!r}: {error}") from error
    replicas = degrees.get("d", layout.data_parallel_size)
    if replicas != layout.data_parallel_size:
        raise UserError(
            f"--compare {text!r}: d{replicas} would need "
            f"{world_size // layout.data_parallel_size * replicas} processes, but there are "
            f"{world_size}. Use d{layout.data_parallel_size}, or leave it out"
        )
    if "sp" in words or layout.tensor_parallel_size == 1:
        return {**chosen, "sequence_parallel": "sp" in words}
    return {**chosen}


def _same_batch(
    cli: _BenchCLI, samples: int, layout: Mapping[str, int | bool], world_size: int
) -> dict[str, int]:
    """Return options that give ``layout`` the same number of samples per step.

    Equal steps make the layouts comparable. There are none if the samples cannot be divided
    evenly, or if the data are not a ``StreamDataModule``.
    """
    data = cli.datamodule
    if not isinstance(data, StreamDataModule):
        return {}
    replicas = ParallelLayout.chosen(layout, world_size=world_size).num_replicas
    rows, remainder = divmod(samples, cli.trainer.accumulate_grad_batches * replicas)
    if remainder or not rows:
        return {}
    size = math.gcd(rows, data.batch_options.plan(replicas).micro_batch_size)
    sizes = {"data.micro_batch_size": size, "data.num_microbatches": rows // size}
    config = getattr(cli.trainer.strategy, "config", None)
    if config is not None and config.micro_batch_size is None:
        sizes["trainer.strategy.num_microbatches"] = rows // size
    return sizes


def _measure(cli: _BenchCLI, data: LightningDataModule | None) -> BenchResult | None:
    """Return the result on global rank 0 and in the process that started it, else None."""
    peak = cli.config.peak_tflops
    with tempfile.TemporaryDirectory() as folder, ending_workers(cli.trainer):
        file = Path(folder) / "result.json"
        times = StepTimes(
            warmup=cli.config.warmup,
            steps=cli.config.steps,
            file=file,
            peak_flops=None if peak is None else peak * 1e12,
        )
        cli.trainer.callbacks.append(times)
        cli.trainer.fit(cli.model, datamodule=data)
        if file.exists():
            return BenchResult.read(json.loads(file.read_text(encoding="utf-8")))
        return None


def _measure_elsewhere(arguments: Sequence[str], options: Sequence[str]) -> BenchResult:
    """Measure another layout in a separate process, with its own memory and its own workers."""
    argv = ["bench", *arguments, *options, "--compare=null", "--json"]
    completed = subprocess.run(
        [sys.executable, "-m", "lightning_ptdp", *argv],
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode != 0:
        messages = completed.stderr.strip().splitlines() or ["it failed"]
        raise UserError(f"{' '.join(options)}: {messages[-1].removeprefix('ptdp: ')}")
    values: list[dict[str, Any]] = json.loads(completed.stdout.splitlines()[-1])
    return BenchResult.read(values[0])
