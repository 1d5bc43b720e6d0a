"""``ptdp bench``: training steps of a configuration by the clock, without data and loggers; several layouts beside each other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from lightning_ptdp.bench import BenchResult, StepTimes, SyntheticData, render
from lightning_ptdp.cli.checks import check_run
from lightning_ptdp.cli.errors import UserError
from lightning_ptdp.cli.lightning_cli import PTDPCLI
from lightning_ptdp.cli.processes import ending_workers
from lightning_ptdp.data import StreamDataModule
from lightning_ptdp.world.layout import AXES

__all__ = ["layout_options", "run"]

# Long enough for any schedule of the learning rate; the fit is ended by its callback.
_MANY_STEPS = 10**6
_DEGREES = {axis.letter: f"{axis.name}_parallel_size" for axis in AXES if axis.name != "data"} | {"v": "virtual_pipeline_size"}


class _BenchCLI(PTDPCLI):
    """A configuration without what does not belong to a training step."""

    def before_instantiate_classes(self) -> None:
        config = self.config
        for name, least in (("warmup", 1), ("steps", 1)):
            if config[name] < least:
                raise UserError(f"--{name} {config[name]} must be at least {least}")
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
    cli = _BenchCLI(verb, arguments)
    others = [layout_options(text) for text in (cli.config.compare or "").split(",") if text.strip()]
    result = _measure(cli)
    if result is None:  # another rank tells
        return 0
    results = [result, *(_measure_elsewhere(arguments, options) for options in others)]
    if cli.config.json:
        print(json.dumps([one.as_dict() for one in results]), flush=True)
    else:
        print(render(results), flush=True)
    return 0


def layout_options(text: str) -> list[str]:
    """``"t2 p2 v2"`` as options of ``ptdp fit``.

    Raises:
        UserError: It is no layout.
    """
    degrees = dict.fromkeys(_DEGREES, 1)
    for word in text.split():
        match = re.fullmatch(rf"([{''.join(_DEGREES)}])(\d+)", word)
        if match is None:
            raise UserError(f"--compare {text.strip()!r}: {word!r} is not a degree; a layout is written like 't2 p2 v2' (or c2)")
        degrees[match[1]] = int(match[2])
    options = [f"--trainer.strategy.{_DEGREES[letter]}={degree}" for letter, degree in degrees.items()]
    return options if degrees["t"] > 1 else [*options, "--trainer.strategy.sequence_parallel=false"]


def _measure(cli: _BenchCLI) -> BenchResult | None:
    """The result, in the process that has global rank 0 or started it."""
    data: LightningDataModule | None = cli.datamodule
    if isinstance(data, StreamDataModule):
        data = SyntheticData(data)
    check_run(cli.trainer, cli.model, data, ckpt_path=None, writes=False)
    peak = cli.config.peak_tflops
    with tempfile.TemporaryDirectory() as folder, ending_workers(cli.trainer):
        file = Path(folder) / "result.json"
        times = StepTimes(
            warmup=cli.config.warmup, steps=cli.config.steps, file=file, peak_flops=None if peak is None else peak * 1e12
        )
        cli.trainer.callbacks.append(times)
        cli.trainer.fit(cli.model, datamodule=data)
        return BenchResult.read(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def _measure_elsewhere(arguments: Sequence[str], options: Sequence[str]) -> BenchResult:
    """Another layout, in a process of its own: with its own memory and its own processes."""
    command = [sys.executable, "-c", "import sys; from lightning_ptdp.cli import main; sys.exit(main())"]
    given = [*arguments, *options, "--compare=null", "--json"]
    done = subprocess.run([*command, "bench", *given], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"{' '.join(options)}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'it failed'}")
    values: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return BenchResult.read(values[0])
