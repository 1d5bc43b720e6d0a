"""Fixtures for the comparison with Lightning's own strategies."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.toys import Conformance
from tests.pool import Pool


@pytest.fixture(scope="session")
def conformance(pool: Pool) -> Conformance:
    return Conformance(pool)


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if it starts a process."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("torch.multiprocessing.start_processes", refuse)
