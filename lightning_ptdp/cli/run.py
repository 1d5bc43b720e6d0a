"""The verbs that run a Trainer: fit, validate, test and predict; also prepare and verify.

``prepare`` stops before the Trainer runs. ``verify`` compares a layout with one process.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_ptdp.base.output import survive_closed_output
from lightning_ptdp.callbacks import (
    ExportHuggingFace,
    PredictionWriter,
    RunReport,
    WriteSamples,
)
from lightning_ptdp.callbacks.artifacts import mlflow_loggers
from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.remote_path import located
from lightning_ptdp.cli.command_line import check_output, check_picture, options_on
from lightning_ptdp.cli.failures import UserError, ending_workers, held_back
from lightning_ptdp.cli.lightning_cli import PTDPCLI
from lightning_ptdp.cli.resume import (
    Found,
    experiment_of,
    find_newest,
    last_checkpoint,
    was_requeued,
)
from lightning_ptdp.cli.run_checks import (
    check_data,
    check_run,
    check_validation_interval,
    check_weights,
)
from lightning_ptdp.shims.lightning import load_only_named_checkpoints
from lightning_ptdp.world.rendezvous_address import launched_processes


def run(verb: str, arguments: list[str]) -> int:
    """Run one verb and return the exit code.

    Raises:
        ValueError: The configuration cannot work.
    """
    if verb == "verify":
        return _verify(arguments)
    if verb == "fit":
        survive_closed_output()
    # Lightning triggers this deprecation warning of torch once per process.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    if verb != "prepare":
        arguments = [*arguments, *_launched_sizes(arguments)]
    cli, ckpt_path = _checked_run(verb, arguments)
    if verb == "prepare":
        _prepare(cli, sys.stdout)
        return 0
    if _launches(cli.trainer):
        # predict prints its results to the standard output
        _prepare(cli, sys.stderr if verb == "predict" else sys.stdout)
        if verb == "fit":
            check_validation_interval(cli.trainer, cli.datamodule)
            for callback in cli.trainer.callbacks:
                if isinstance(callback, WriteSamples):
                    callback.check(cli.model, cli.datamodule)
    if verb == "fit":
        return _fit(cli, ckpt_path)
    if ckpt_path is None:
        rank_zero_info(f"ptdp {verb} without --ckpt_path uses the initial weights")
    with ending_workers(cli.trainer):
        if verb == "predict":
            _predict(cli, ckpt_path)
        else:
            getattr(cli.trainer, verb)(cli.model, datamodule=cli.datamodule, ckpt_path=ckpt_path)
    return 0


def _checked_run(verb: str, arguments: list[str]) -> tuple[PTDPCLI, str | None]:
    """Build the run, and check it; return it with its checkpoint."""
    with held_back():
        cli = PTDPCLI(verb, arguments)
        ckpt_path = _ckpt_path(cli, verb)
        if verb == "fit":
            _check_fit(cli, ckpt_path)
        elif verb == "prepare":
            check_data(cli.trainer, cli.datamodule)
        else:
            check_run(cli.trainer, cli.model, cli.datamodule, ckpt_path=ckpt_path, writes=False)
    return cli, ckpt_path


def _verify(arguments: list[str]) -> int:
    """Compare a layout with one process, and return 0 if they are equal, else 1."""
    from lightning_ptdp.verification import VerificationError, verify

    with held_back():
        cli = PTDPCLI("verify", [*arguments, "--trainer.logger=false"])
        config = cli.config
        if not hasattr(cli.trainer.strategy, "config"):
            raise UserError(
                "ptdp verify compares a layout of the ptdp strategy. Use --trainer.strategy ptdp"
            )
        if config.steps < 1:
            raise UserError(f"--steps {config.steps} must be at least 1")
        check_picture("--output", config.output)
        check_run(cli.trainer, cli.model, cli.datamodule, ckpt_path=None, writes=False)
    if cli.datamodule is not None:
        cli.datamodule.prepare_data()
    options = {
        **{key: value for key, value in vars(cli.config_init.trainer).items() if value is not None},
        "devices": cli.trainer.num_devices,
        "strategy": cli.trainer.strategy,
    }
    try:
        report = verify(
            cli.model,
            cli.datamodule,
            steps=config.steps,
            blocks=config.blocks,
            limit_s=config.limit_s,
            **options,
        )
    except VerificationError as error:
        print(f"ptdp verify: {error}", *getattr(error, "__notes__", ()), sep="\n")
        return 1
    print(report)
    if config.output:
        report.draw(config.output)
    return int(not report.equal)


def _launched_sizes(arguments: Sequence[str]) -> list[str]:
    """Return the launcher's numbers of devices and nodes as options.

    They replace those of files. An option on the command line stays as it is.
    """
    found = launched_processes(os.environ)
    given = {option.name for option in options_on(arguments)}
    sizes = zip(("--trainer.devices", "--trainer.num_nodes"), found or (), strict=False)
    return [f"{name}={size}" for name, size in sizes if name not in given]


def _check_fit(cli: PTDPCLI, ckpt_path: str | None) -> None:
    weights = cli.config.init_from
    if weights is not None and cli.config.ckpt_path is not None:
        raise UserError(
            "--init_from and --ckpt_path are both set. Use --init_from to start a new "
            "training from weights, or --ckpt_path to resume a training"
        )
    check_run(cli.trainer, cli.model, cli.datamodule, ckpt_path=ckpt_path, writes=True)
    if weights is not None:
        check_weights(weights, cli.model)
    read = [cli.values.get(name) for name in ("model", "data", "init_from")]
    for callback in cli.trainer.callbacks:
        if isinstance(callback, ExportHuggingFace):
            callback.check(cli.trainer, [*read, ckpt_path])
        if isinstance(callback, WriteSamples) and _launches(cli.trainer):
            callback.texts()  # else only rank 0 needs the file


def _ckpt_path(cli: PTDPCLI, verb: str) -> str | None:
    """Return the checkpoint to load: the result of ``--resume auto``, else ``--ckpt_path``."""
    ckpt_path: str | None = cli.config.ckpt_path
    located(ckpt_path or "")  # refuses credentials before anything shows them
    if ckpt_path == "best":
        raise UserError(
            "--ckpt_path best is known only to the process that has trained. Give the path that "
            "fit printed"
        )
    if ckpt_path == "last":
        ckpt_path = last_checkpoint(cli.trainer)
    strategy: Any = cli.trainer.strategy
    if verb != "fit":
        return ckpt_path
    if not hasattr(strategy, "run_facts"):
        if cli.config.resume is not None:
            raise UserError(
                "--resume auto needs checkpoints of the ptdp strategy. Use --trainer.strategy "
                "ptdp, or give a checkpoint (--ckpt_path)"
            )
        return ckpt_path
    experiment = experiment_of(
        cli.values, cli.datamodule, num_replicas=strategy.layout.num_replicas
    )
    strategy.run_facts = {"experiment": experiment, "started_from": ckpt_path}
    newest = Found()
    if cli.config.resume is not None or was_requeued():
        newest = find_newest(cli.trainer, experiment, started_from=ckpt_path)
        rank_zero_info(f"--resume auto: {_decision(newest, ckpt_path)}")
    if newest.own is not None:
        for logger in mlflow_loggers(cli.trainer):
            logger.continue_run_of(str(newest.own))
        return os.fspath(newest.own)
    if ckpt_path is None:
        load_only_named_checkpoints(cli.trainer)
    return ckpt_path


def _decision(newest: Found, ckpt_path: str | None) -> str:
    if newest.own is not None:
        return f"resuming from {newest.own}"
    start = "there is no checkpoint of this experiment"
    if ckpt_path is not None:
        return f"{start}; starting from {ckpt_path}"
    if newest.other is None:
        return start
    return (
        f"{start}. {newest.other} is not used: {newest.why}. To resume from it, use --ckpt_path "
        f"{newest.other}"
    )


def _fit(cli: PTDPCLI, ckpt_path: str | None) -> int:
    layout = getattr(cli.trainer.strategy, "layout", None)
    if layout is not None:
        for logger in mlflow_loggers(cli.trainer):
            logger.set_layout(layout.describe())
    if (sample := cli.config_init.sample) is not None:
        cli.trainer.callbacks.append(WriteSamples([sample.prompt], sample, at="end"))
    if layout is not None:
        cli.trainer.strategy.returns_weights = False  # the model is not used after the fit
    with tempfile.TemporaryDirectory() as folder:
        cli.report.file = str(Path(folder) / "record.json")
        try:
            with ending_workers(cli.trainer):
                cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=ckpt_path)
        except BaseException:
            record = RunReport.read(cli.report.file)
            if record is not None and not record.finished:
                print(
                    "\ntraining ended early", *record.lines(), sep="\n", file=sys.stderr, flush=True
                )
            raise
    return 0


def _predict(cli: PTDPCLI, ckpt_path: str | None) -> None:
    output: str | None = cli.config.output
    check_output(output)
    if output is not None:
        read = [dict(getattr(cli.datamodule, "hparams", {})), ckpt_path]
        files.check_apart(output, files.existing_paths(read), what="--output")
    cli.trainer.callbacks.append(PredictionWriter(output))
    cli.trainer.predict(
        cli.model, datamodule=cli.datamodule, ckpt_path=ckpt_path, return_predictions=False
    )


def _prepare(cli: PTDPCLI, output: TextIO) -> None:
    """Prepare the data in this process, where the user sees its messages, before ranks start."""
    if cli.datamodule is not None:
        with _showing("lightning_ptdp.data", output):
            cli.datamodule.prepare_data()


@contextmanager
def _showing(name: str, output: TextIO) -> Iterator[None]:
    """Print the messages of the loggers below ``name``."""
    logger = logging.getLogger(name)
    handler = logging.StreamHandler(output)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _launches(trainer: Trainer) -> bool:
    """Return True if this process starts the ranks.

    A rank that a launcher started must leave data preparation to Lightning's rank 0.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return environment is None or not environment.creates_processes_externally
