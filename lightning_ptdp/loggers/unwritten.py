"""Metrics that a store did not take, in a file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported when it is used
    from mlflow.entities import Metric

__all__ = ["keep_metrics"]

_FILE = "unwritten_metrics.jsonl"


def keep_metrics(folder: Path, metrics: Sequence[Metric]) -> str:
    """Append MLflow's metrics to a file in ``folder``, one JSON object a line; says what was done. Never raises: where the file cannot be
    written either, the metrics are named that are lost."""
    if not metrics:
        return "which has all its metrics"
    rows = [{"key": metric.key, "value": metric.value, "timestamp": metric.timestamp, "step": metric.step} for metric in metrics]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _append(folder / _FILE, "".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        steps = sorted({metric.step for metric in metrics})
        return (
            f"and {len(metrics)} metrics are lost, which it did not take and {folder / _FILE} did not either ({error}): "
            f"{', '.join(sorted({metric.key for metric in metrics}))} of steps {steps[0]} to {steps[-1]}"
        )
    return f"and {len(metrics)} metrics that it did not take are kept in {folder / _FILE}"


def _append(path: Path, text: str) -> None:
    """All of ``text`` or nothing of it."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, size)
        raise
