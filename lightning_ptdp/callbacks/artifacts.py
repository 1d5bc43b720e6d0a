"""Storage of a run's texts, tables, tags and files in loggers that support them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ptdp.loggers import MLFlowLogger

__all__ = ["store_files", "store_table", "store_tags", "store_text"]


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


def store_files(logger: Logger, files: Sequence[Path], *, folder: str) -> None:
    """Store files in ``folder`` of the run's artifacts in MLflow.

    A failure is a warning, because the files remain on disk."""
    if not _is(logger, "MLFlowLogger"):
        return
    try:
        for file in files:
            logger.experiment.log_artifact(logger.run_id, str(file), folder)
    except Exception as error:
        rank_zero_warn(
            f"{files[0].name} could not be stored with the run, it is in {files[0].parent}: {error}"
        )


def _is(logger: Logger, name: str) -> bool:
    """Return True for Lightning's logger of this name, and for loggers derived from it.

    The logger may be from either of Lightning's packages. Methods do not identify a logger: W&B's
    ``log_text`` has the name of this package's method and other arguments.
    """
    return any(kind.__name__ == name for kind in type(logger).__mro__)


def _cell(value: object) -> str:
    """Return a value for Markdown tables, whose cells hold neither bars nor line breaks."""
    return str(value).replace("|", "\\|").replace("\n", "<br>")
