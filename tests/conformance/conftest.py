"""Fixture of the comparison with Lightning's own strategies."""

from __future__ import annotations

import pytest

from tests.conformance.toys import Conformance
from tests.pool import Pool


@pytest.fixture(scope="session")
def conformance(pool: Pool) -> Conformance:
    return Conformance(pool)
