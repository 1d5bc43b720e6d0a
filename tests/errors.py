"""Expected errors, compared by parts of their messages."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raises_with(
    words: Iterable[str], kind: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error whose message contains all the words."""
    with pytest.raises(kind) as error:
        yield error
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"
