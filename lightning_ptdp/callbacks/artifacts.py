"""Folder of a run, its configuration there, and storage in loggers that support it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ptdp.checkpoint.remote_path import Place, is_url, located
from lightning_ptdp.loggers import MLFlowLogger


def run_folder(trainer: Trainer) -> Path:
    """Return the folder of this run, above Lightning's ``checkpoints``.

    It is ``lightning_logs`` in the working directory if the run's own folder is in object storage,
    which this package's callbacks do not write to. Call this function on global rank 0 only; it is
    not collective."""
    logger = next(iter(trainer.loggers), None)
    log_dir = getattr(logger, "log_dir", None)
    root = log_dir or getattr(logger, "save_dir", None) or trainer.default_root_dir
    if is_url(root):
        return Path("lightning_logs")
    if logger is None or log_dir is not None:
        return Path(root)
    version = logger.version
    name = version if isinstance(version, str) else f"version_{version}"
    return Path(root) / str(logger.name) / name


def store_text(logger: Logger, text: str, name: str) -> None:
    """Store a text as the artifact ``name`` in MLflow."""
    if isinstance(logger, MLFlowLogger):
        logger.log_text(text, name)
    elif _is(logger, "MLFlowLogger"):
        logger.experiment.log_text(logger.run_id, text, name)


def store_tags(logger: Logger, tags: Mapping[str, object]) -> None:
    """Set tags of the run in MLflow."""
    if isinstance(logger, MLFlowLogger):
        logger.log_tags(tags)
    elif _is(logger, "MLFlowLogger"):
        for name, value in tags.items():
            logger.experiment.set_tag(logger.run_id, name, value)


def store_table(logger: Logger, table: Mapping[str, list[Any]], name: str, *, step: int) -> None:
    """Store a table with equally long columns.

    MLflow and W&B store it as a table, TensorBoard as text."""
    if isinstance(logger, MLFlowLogger):
        logger.log_table(table, f"{name}.json")
    elif _is(logger, "MLFlowLogger"):
        logger.experiment.log_table(logger.run_id, data=dict(table), artifact_file=f"{name}.json")
    elif _is(logger, "WandbLogger"):
        rows = [list(row) for row in zip(*table.values(), strict=True)]
        logger.log_table(name, columns=list(table), data=rows, step=step)
    elif _is(logger, "TensorBoardLogger"):
        lines = ["| " + " | ".join(table) + " |", "|---" * len(table) + "|"]
        lines += [
            "| " + " | ".join(_cell(value) for value in row) + " |"
            for row in zip(*table.values(), strict=True)
        ]
        logger.experiment.add_text(name, "\n".join(lines), step)


def model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    """Return the ``ModelCheckpoint`` callbacks of a run."""
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]


def checkpoint_dirs(trainer: Trainer) -> list[Place]:
    """Return the folders that a run's ``ModelCheckpoint`` callbacks have."""
    folders = [callback.dirpath for callback in model_checkpoints(trainer)]
    return [located(folder) for folder in folders if folder is not None]


def hyperparameters(
    module: LightningModule, datamodule: LightningDataModule | None
) -> dict[str, dict[str, Any]]:
    """Return the hyperparameters of a module and its data, by their keys in checkpoints."""
    owners = {"hyper_parameters": module, "datamodule_hyper_parameters": datamodule}
    return {key: dict(getattr(owner, "hparams", {})) for key, owner in owners.items()}


def mlflow_loggers(trainer: Trainer) -> list[MLFlowLogger]:
    """Return the loggers of a run that are this package's ``MLFlowLogger``."""
    return [logger for logger in trainer.loggers if isinstance(logger, MLFlowLogger)]


def keep_files(
    trainer: Trainer,
    writers: Mapping[str, Callable[[Path], object]],
    *,
    kind: str,
    step: int,
    dirpath: str | None,
) -> bool:
    """Write files of a step, such as ``step-000100.png``, and store them in MLflow too.

    Call it on global rank 0 only. If a file cannot be written, there is a warning, because a full
    disk must not end training, and the result is False.

    Args:
        trainer: Trainer of the run.
        writers: Function that writes a file, by its suffix.
        kind: Folder of the files among the run's artifacts.
        step: Number of the step.
        dirpath: Folder of the files on disk; None: ``kind`` in the run's folder.
    """
    folder = run_folder(trainer) / kind if dirpath is None else Path(dirpath)
    files = {folder / f"step-{step:06d}{suffix}": write for suffix, write in writers.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, write in files.items():
            write(file)
    except OSError as error:
        rank_zero_warn(f"the {kind} of step {step} could not be written: {error}")
        return False
    for logger in trainer.loggers:
        if not _is(logger, "MLFlowLogger"):
            continue
        try:
            for file in files:
                logger.experiment.log_artifact(logger.run_id, str(file), kind)
        except Exception as error:
            rank_zero_warn(
                f"{kind}: the files of step {step} could not be stored with the run. They are in "
                f"{folder}: {error}"
            )
    return True


def _is(logger: Logger, name: str) -> bool:
    """Return True for Lightning's logger of this name, and for loggers derived from it.

    The logger may be from either of Lightning's packages. Methods do not identify a logger: W&B's
    ``log_text`` has the name of this package's method and other arguments.
    """
    return any(kind.__name__ == name for kind in type(logger).__mro__)


def _cell(value: object) -> str:
    """Return a value for Markdown tables, whose cells hold neither bars nor line breaks."""
    return str(value).replace("|", "\\|").replace("\n", "<br>")


# ---- Callback that keeps the resolved configuration with the run ---------------------------------


class SaveResolvedConfig(Callback):
    """Callback that writes ``config.yaml`` into the run folder, and as an artifact in MLflow.

    Every logger gets the Trainer's and the strategy's keys as hyperparameters, in addition to those
    of the module and the data, which Lightning logs. A run that is resumed in the same folder with
    another configuration writes ``config-1.yaml`` and so on. No file is overwritten.

    Args:
        text: The resolved configuration as YAML.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the configuration, on global rank 0."""
        if stage != "fit" or not trainer.is_global_zero or trainer.fast_dev_run:
            return
        path = _unused(run_folder(trainer), self.text)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text, encoding="utf-8")
        for logger in trainer.loggers:
            store_text(logger, self.text, path.name)
            logger.log_hyperparams(_parameters(self.text))


_OBJECTS = ("callbacks", "logger", "plugins", "profiler", "strategy")
"""Keys of the Trainer that are objects, not values."""


def _parameters(text: str) -> dict[str, object]:
    config = yaml.safe_load(text)
    trainer = config.get("trainer") or {}
    strategy = trainer.get("strategy")
    return {
        "seed_everything": config.get("seed_everything"),
        "trainer": {key: value for key, value in trainer.items() if key not in _OBJECTS},
        "strategy": strategy.get("init_args", strategy) if isinstance(strategy, dict) else strategy,
    }


def _unused(folder: Path, text: str) -> Path:
    """Return the first of config.yaml, config-1.yaml, … that is free or holds ``text``."""
    path = folder / "config.yaml"
    number = 0
    while path.exists() and path.read_text(encoding="utf-8") != text:
        number += 1
        path = folder / f"config-{number}.yaml"
    return path
