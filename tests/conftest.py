"""Shared fixtures: the worker pool, one thread a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = (
    f"{Path(__file__).with_name('starts')}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(
        os.pathsep
    )
)

from tests.pool import Pool
from tests.quick import is_quick


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is quick."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and is_quick(
            item.path.relative_to(here).with_suffix("").as_posix(), item.name
        ):
            item.add_marker(pytest.mark.quick)
