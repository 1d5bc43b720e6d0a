"""Shared fixtures: the worker pool, one thread a process."""

from __future__ import annotations

import gc
import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.parity import Parity

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some libraries ask torch for GPUs when they are imported. Without a driver no process can then be
# forked from a forked one, unless torch asks NVML.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ["PYTHONPATH"] = (
    f"{Path(__file__).with_name('starts')}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(
        os.pathsep
    )
)

from tests.pool import Pool

# For this process too, which Python has started without the folder.
runpy.run_path(str(Path(__file__).with_name("starts") / "sitecustomize.py"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def parity(pool: Pool) -> Parity:
    # Most tests do without Lightning's import.
    from tests.parity import Parity

    return Parity(pool)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as quick the tests of all modules that are not thorough."""
    for item in items:
        if item.get_closest_marker("thorough") is None:
            item.add_marker(pytest.mark.quick)


def pytest_collection_finish() -> None:
    """Exclude the collected modules and tests from every later garbage collection.

    A collection writes to every object that it inspects, and so copies the pages of forked ranks.
    """
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter free everything; else extension modules report leaks at its end."""
    gc.unfreeze()
