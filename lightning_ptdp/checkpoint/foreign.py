"""Files that somebody else may have written: where they lie, how large they are, and what JSON they hold.

Nothing here believes what a file says of itself. What does not fit is a ``CheckpointError`` that names the file and what is wrong.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lightning_ptdp.checkpoint.errors import CheckpointError

__all__ = [
    "FILE_NAME",
    "Check",
    "Json",
    "Misfit",
    "anything",
    "flag",
    "integer",
    "list_of",
    "map_of",
    "number",
    "one_of",
    "optional",
    "parsed_json",
    "read_json",
    "record",
    "regular_size",
    "text",
]

Json = Any  # what json.dumps takes: a recursive type that type checkers follow poorly
T = TypeVar("T")
Check = Callable[[Json], T]
"""From a value to what it stands for; raises a Misfit."""

FILE_NAME = r"[A-Za-z0-9_.][A-Za-z0-9_.+-]{0,200}"
_MOST_JSON = 1 << 26
_MOST_CONTAINERS = 1 << 20
_MOST_DEPTH = 64
_SHOWN = 60


class Misfit(ValueError):
    """A value is not what belongs there.

    Args:
        what: Said of the value: ``"is 'x', not a whole number"``.
        place: The way to it: ``"tensors.w.shape[3]"``.
    """

    def __init__(self, what: str, place: str = "") -> None:
        super().__init__(f"{place.removeprefix('.') or 'it'} {what}")
        self.what, self.place = what, place


def regular_size(file: Path, *, folders: Sequence[Path] = ()) -> int:
    """Size of a regular file in bytes. A link counts if it leads to one in the file's own folder, or in one of ``folders``.

    Raises:
        CheckpointError: It is something else (a pipe, a device), or a link that leads elsewhere.
        OSError: It is not there.
    """
    found = os.lstat(file)
    if stat.S_ISLNK(found.st_mode):
        found, target = os.stat(file), os.path.realpath(file)
        if not any(Path(target).parent == Path(os.path.realpath(folder)) for folder in (file.parent, *folders)):
            raise CheckpointError(f"{file} is a link to {target}, outside of its folder: put the file itself there")
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{file} is not a regular file")
    return found.st_size


def read_json(file: Path, *, folders: Sequence[Path] = (), most_bytes: int = _MOST_JSON) -> Json:
    """What JSON a file holds.

    Args:
        file: The file.
        folders: As of :func:`regular_size`.
        most_bytes: Larger files are not read.

    Raises:
        CheckpointError: It is not there, too large, nested too deeply, or not JSON.
    """
    try:
        size = regular_size(file, folders=folders)
        if size > most_bytes:
            raise CheckpointError(f"{file} has {size} bytes; no more than {most_bytes} are read")
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    return parsed_json(file, content)


def parsed_json(file: Path, content: bytes, *, most_containers: int = _MOST_CONTAINERS) -> Json:
    """What the JSON ``content`` of ``file`` holds, of at most so many lists and objects: each takes 30 times its brackets.

    Raises:
        CheckpointError: As :func:`read_json`.
    """
    if (found := content.count(b"[") + content.count(b"{")) > most_containers:
        raise CheckpointError(
            f"{file} is damaged: it holds {found} lists and objects, where no more than {most_containers} make sense"
        )
    try:
        return json.loads(content)
    except RecursionError as error:
        raise CheckpointError(f"{file} is damaged: it is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def integer(least: int = 0, most: int = 2**62) -> Check[int]:
    """A whole number."""

    def check(value: Json) -> int:
        if type(value) is not int or not least <= value <= most:
            raise Misfit(f"is {_shown(value)}, not a whole number from {least} to {most}")
        return value

    return check


def number(least: float, most: float) -> Check[float]:
    """A number with or without a fraction."""

    def check(value: Json) -> float:
        if type(value) not in (int, float) or not least <= value <= most:
            raise Misfit(f"is {_shown(value)}, not a number from {least:g} to {most:g}")
        return float(value)

    return check


def flag(value: Json) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise Misfit(f"is {_shown(value)}, neither true nor false")
    return value


def text(pattern: str = r".{0,4096}", called: str = "text") -> Check[str]:
    """Text that matches a regular expression from end to end."""
    compiled = re.compile(pattern, re.DOTALL)

    def check(value: Json) -> str:
        if type(value) is not str or compiled.fullmatch(value) is None or value in (".", ".."):
            raise Misfit(f"is {_shown(value)}, not {called}")
        return value

    return check


def one_of(known: Mapping[str, T], called: str) -> Check[T]:
    """One of several names, and what it stands for."""

    def check(value: Json) -> T:
        if type(value) is not str or value not in known:
            raise Misfit(f"is {_shown(value)}, not {called}")
        return known[value]

    return check


def optional(check: Check[T]) -> Check[T | None]:
    """Null, or what ``check`` takes."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check[T], *, most: int = 2**62) -> Check[tuple[T, ...]]:
    """A list of equal things."""

    def check_list(value: Json) -> tuple[T, ...]:
        if not isinstance(value, list | tuple) or len(value) > most:
            raise Misfit(f"is {_shown(value)}, not a list" + (f" of at most {most}" if most < 2**62 else ""))
        done = 0
        found: list[T] = []
        try:
            for done, item in enumerate(value):  # noqa: B007 (read when an item does not fit)
                found.append(check(item))
        except Misfit as error:
            raise Misfit(error.what, f"[{done}]{error.place}") from None
        return tuple(found)

    return check_list


def map_of(check: Check[T], *, key: Check[str] = lambda key: key) -> Check[dict[str, T]]:
    """An object whose keys are names and whose values are equal things."""

    def check_map(value: Json) -> dict[str, T]:
        if not isinstance(value, dict):
            raise Misfit(f"is {_shown(value)}, not an object")
        name, found = "", {}
        try:
            for name, item in value.items():
                found[key(name)] = check(item)
        except Misfit as error:
            raise Misfit(error.what, f".{name!s:.{_SHOWN}}{error.place}") from None
        return found

    return check_map


def record(others: bool = False, **fields: Check[Any]) -> Check[dict[str, Any]]:
    """An object of these fields; one that ``optional`` made may be missing.

    Args:
        others: Whether there may be further fields, which are left out.
        fields: Their checks, by name.
    """

    def check(value: Json) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Misfit(f"is {_shown(value)}, not an object")
        if not others and (unknown := value.keys() - fields.keys()):
            raise Misfit(f"has the field {_shown(min(unknown))}, which is not known")
        name, found = "", {}
        try:
            for name, field in fields.items():
                found[name] = field(value.get(name))
        except Misfit as error:
            missing = name not in value and not error.place
            raise Misfit("is missing" if missing else error.what, f".{name}{error.place}") from None
        return found

    return check


def anything(value: Json, depth: int = _MOST_DEPTH) -> Json:
    """Any JSON that is not nested deeply."""
    if depth == 0:
        raise Misfit("is nested too deeply")
    if isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            anything(item, depth - 1)
    return value


def _shown(value: Json) -> str:
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"
    return "missing or null" if value is None else f"{value!r:.{_SHOWN}}"
