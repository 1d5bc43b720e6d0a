"""Fixture of runs in one process, each trained once per test module."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.huggingface.runs import Run, fit
from tests.pool import Pool


@pytest.fixture(scope="module")
def reference(pool: Pool) -> Any:
    @cache
    def one_process(run: Run) -> dict[str, Any]:
        return pool.run(fit, world_size=1, args=(run,))[0]

    return one_process
