"""Base class of this package's errors, and parts of their messages."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from itertools import islice


class PTDPError(Exception):
    """Base class of every error of this package.

    An error is also a ``ValueError`` (or ``ImportError``) if the user can fix its cause. It is also
    a ``RuntimeError`` if it depends on events of the run.
    """


def one_line(text: object) -> str:
    """Return the beginning of a text, such as another library's error, on one line."""
    return " ".join(str(text).split())[:300]


def listed(names: Collection[str], limit: int, separator: str = ", ") -> str:
    """Return the first names for a message, and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(islice(names, limit)) + more


def numbered(what: str, numbers: Sequence[int]) -> str:
    """Return ``"rank 1"`` or ``"ranks 1, 2"``."""
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"Did you mean 'x'? "``, or "" if no known name is close."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"Did you mean {near[0]!r}? " if near else ""
