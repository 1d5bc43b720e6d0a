"""Fixtures for the comparison with Lightning's own strategies."""

from typing import Any

import pytest

from tests.conformance.toys import Conformance


@pytest.fixture(scope="session")
def conformance(pool):
    return Conformance(pool)


@pytest.fixture
def nothing_starts(monkeypatch):
    """Fail the test if it starts a process."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("torch.multiprocessing.start_processes", refuse)
