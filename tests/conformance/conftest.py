"""Fixtures for the comparison with Lightning's own strategies."""

from typing import Any

import pytest

from tests.conformance.toys import Conformance
from tests.pool import Pool


@pytest.fixture(scope="session")
def conformance(pool):
    return Conformance(pool)


@pytest.fixture
def fresh():
    """Yield a pool that has not run a backward pass, after which torch cannot be forked."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture
def nothing_starts(monkeypatch):
    """Fail the test if it starts a process."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("torch.multiprocessing.start_processes", refuse)
