"""Errors whose messages must hold several words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(*words: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """Expect an error whose message has all of the words."""
    with pytest.raises(error) as found:
        yield
    for word in words:
        assert word in str(found.value)
