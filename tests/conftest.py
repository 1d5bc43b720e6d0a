"""Shared fixtures: the worker pool, one thread a process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.pool import Pool


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that share the pool come first, and all in the same process of pytest-xdist: a second pool would only be in the way."""

    def alone(item: pytest.Item) -> bool:
        return "pool" not in getattr(item, "fixturenames", ())

    items.sort(key=alone)
    for item in items:
        if not alone(item):
            item.add_marker(pytest.mark.xdist_group("pool"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()
