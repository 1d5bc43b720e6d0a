"""File of metrics that a store did not accept."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported when used
    from mlflow.entities import Metric

__all__ = ["append_metrics", "keep_metrics", "unwritten_file"]

_FILE = "unwritten_metrics.jsonl"


def unwritten_file(folder: Path) -> Path:
    """Return the file in a run's folder for metrics that a store did not accept."""
    return folder / _FILE


def append_metrics(folder: Path, metrics: Sequence[Metric]) -> None:
    """Append MLflow's metrics to a file in ``folder``, one JSON object per line.

    Raises:
        OSError: The file cannot be written.
    """
    rows = [
        {
            "key": metric.key,
            "value": metric.value,
            "timestamp": metric.timestamp,
            "step": metric.step,
        }
        for metric in metrics
    ]
    folder.mkdir(parents=True, exist_ok=True)
    _append(unwritten_file(folder), "".join(json.dumps(row) + "\n" for row in rows))


def keep_metrics(folder: Path, metrics: Sequence[Metric]) -> str:
    """Append metrics as ``append_metrics`` does, and return a sentence about it.

    If that fails, the sentence names the lost metrics. Never raises."""
    if not metrics:
        return "but it has all its metrics"
    try:
        append_metrics(folder, metrics)
    except OSError as error:
        steps = sorted({metric.step for metric in metrics})
        return (
            f"and {len(metrics)} metrics are lost, because neither the run nor "
            f"{unwritten_file(folder)} accepted them ({error}): "
            f"{', '.join(sorted({metric.key for metric in metrics}))} of steps {steps[0]} to "
            f"{steps[-1]}"
        )
    return f"and {len(metrics)} metrics that it did not accept are kept in {unwritten_file(folder)}"


def _append(path: Path, text: str) -> None:
    """Append all of ``text``, or nothing if an error occurs."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, size)
        raise
