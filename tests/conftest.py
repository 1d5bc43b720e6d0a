"""Shared fixtures: a worker pool with one thread per process."""

import atexit
import contextlib
import gc
import os
import runpy
from pathlib import Path

import pytest

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some libraries query torch for GPUs at import. Without a driver, a forked process can then fork
# again only if torch queries NVML.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ["PYTHONPATH"] = (
    f"{Path(__file__).with_name('starts')}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(
        os.pathsep
    )
)

from tests.pool import Pool

# Do not preempt a process when another one wakes up. gloo's threads hold a lock while they wake
# their peers, and the next thread that needs the lock spins. This process's children inherit it.
with contextlib.suppress(AttributeError, OSError):  # other systems have no such policy
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# This process was started without the folder on its path.
runpy.run_path(str(Path(__file__).with_name("starts") / "sitecustomize.py"))


@pytest.fixture(autouse=True)
def no_tracking_store(monkeypatch):
    """Hide the store of an earlier test: Lightning's MLflow logger sets it for the whole process."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="session")
def pool():
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def parity(pool):
    # Most tests do not need Lightning, whose import is slow.
    from tests.parity import Parity

    return Parity(pool)


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-xdist start files in the order of collection, not by their number of tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that is not thorough as quick, and start files of thorough tests first.

    With the long files first, the processes that share the tests end at the same time.
    """
    thorough = set()
    for item in items:
        if item.get_closest_marker("thorough") is None:
            item.add_marker(pytest.mark.quick)
        else:
            thorough.add(item.path)
    items.sort(key=lambda item: item.path not in thorough)


def pytest_collection_finish() -> None:
    """Exclude the collected modules and tests from every later garbage collection.

    A collection writes to every object that it inspects, which copies memory pages in forked ranks.
    At the end pytest collects ten times, each of which would take a second.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise extension modules report leaks at exit
