"""Checks of JSON content, composed like the content.

A file's statements about itself are not trusted. A wrong value raises a ``Misfit`` that names the
place and the fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lightning_ptdp.base.errors import PTDPError

Json = Any  # input of json.dumps: a recursive type that type checkers follow poorly
T = TypeVar("T")
Check = Callable[[Json], T]
"""Converts a value to its meaning; raises a Misfit."""

FILE_NAME = r"[A-Za-z0-9_.][A-Za-z0-9_.+-]{0,200}"
_SHOWN = 60


class Misfit(PTDPError, ValueError):
    """A value does not fit its place.

    Args:
        what: Statement about the value: ``"is 'x', not an integer"``.
        place: Path to the value: ``"tensors.w.shape[3]"``.
    """

    def __init__(self, what: str, place: str = "") -> None:
        super().__init__(f"{place.removeprefix('.') or 'it'} {what}")
        self.what = what
        self.place = place


def integer(least: int = 0, most: int = 2**62) -> Check[int]:
    """Return a check for an integer."""

    def check(value: Json) -> int:
        if type(value) is not int or not least <= value <= most:
            raise Misfit(f"is {_shown(value)}, but must be an integer from {least} to {most}")
        return value

    return check


def number(least: float, most: float) -> Check[float]:
    """Return a check for a number with or without a fraction."""

    def check(value: Json) -> float:
        if type(value) not in (int, float) or not least <= value <= most:
            raise Misfit(f"is {_shown(value)}, but must be a number from {least:g} to {most:g}")
        return float(value)

    return check


def flag(value: Json) -> bool:
    """Check that a value is true or false."""
    if type(value) is not bool:
        raise Misfit(f"is {_shown(value)}, but must be true or false")
    return value


def text(pattern: str = r".{0,4096}", called: str = "text") -> Check[str]:
    """Return a check for text that matches a regular expression from end to end."""
    compiled = re.compile(pattern, re.DOTALL)

    def check(value: Json) -> str:
        if type(value) is not str or compiled.fullmatch(value) is None or value in (".", ".."):
            raise Misfit(f"is {_shown(value)}, but must be {called}")
        return value

    return check


def one_of(known: Mapping[str, T], called: str) -> Check[T]:
    """Return a check for one of several names, which returns the value of the name."""

    def check(value: Json) -> T:
        if type(value) is not str or value not in known:
            raise Misfit(f"is {_shown(value)}, but must be {called}")
        return known[value]

    return check


def optional(check: Check[T]) -> Check[T | None]:
    """Return a check for null, or a value that ``check`` takes."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check[T], *, most: int = 2**62) -> Check[tuple[T, ...]]:
    """Return a check for a list whose items all pass ``check``."""

    def check_list(value: Json) -> tuple[T, ...]:
        if not isinstance(value, list | tuple) or len(value) > most:
            raise Misfit(
                f"is {_shown(value)}, but must be a list"
                + (f" of at most {most} items" if most < 2**62 else "")
            )
        return tuple(_inside(check, item, index) for index, item in enumerate(value))

    return check_list


def map_of(check: Check[T], *, key: Check[str] = lambda key: key) -> Check[dict[str, T]]:
    """Return a check for an object whose keys pass ``key`` and whose values pass ``check``."""

    def check_map(value: Json) -> dict[str, T]:
        if not isinstance(value, dict):
            raise Misfit(f"is {_shown(value)}, but must be an object")
        return {
            _inside(key, name, name): _inside(check, item, name) for name, item in value.items()
        }

    return check_map


def record(others: bool = False, **fields: Check[Json]) -> Check[dict[str, Json]]:
    """Return a check for an object of these fields.

    A field may be missing if its check was made by ``optional``.

    Args:
        others: Whether further fields are allowed; they are left out of the result.
        fields: Checks of the fields, by name.
    """

    def check(value: Json) -> dict[str, Json]:
        if not isinstance(value, dict):
            raise Misfit(f"is {_shown(value)}, but must be an object")
        if not others and (unknown := value.keys() - fields.keys()):
            raise Misfit(f"has the unknown field {_shown(min(unknown))}")
        return {
            name: _inside(field, value.get(name), name, missing=name not in value)
            for name, field in fields.items()
        }

    return check


def _inside(check: Check[T], value: Json, key: str | int, *, missing: bool = False) -> T:
    """Return ``check(value)`` for the value under ``key`` of a list or object."""
    try:
        return check(value)
    except Misfit as error:
        place = f"[{key}]" if isinstance(key, int) else f".{key!s:.{_SHOWN}}"
        raise Misfit(
            "is missing" if missing and not error.place else error.what, f"{place}{error.place}"
        ) from None


def _shown(value: Json) -> str:
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)} items"
    return "missing or null" if value is None else f"{value!r:.{_SHOWN}}"
