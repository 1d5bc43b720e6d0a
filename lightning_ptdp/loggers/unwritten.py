"""Metrics that a store did not take, in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["keep_metrics"]

_FILE = "unwritten_metrics.jsonl"


def keep_metrics(folder: Path, metrics: Sequence[Any]) -> str:
    """Append MLflow's metrics to a file in ``folder``, one JSON object a line; says what was done."""
    if not metrics:
        return "which has all its metrics"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _FILE, "a", encoding="utf-8") as stream:
        for metric in metrics:
            row = {"key": metric.key, "value": metric.value, "timestamp": metric.timestamp, "step": metric.step}
            stream.write(json.dumps(row) + "\n")
    return f"and {len(metrics)} metrics that it did not take are kept in {folder / _FILE}"
