"""Type checks of options, based on their annotations.

All dataclasses and functions with options for users share one check. ``check_integer``,
``check_fraction`` and ``check_writable_folder`` check what an annotation cannot say.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
import reprlib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

Hint = Any
"""An annotation in any form."""

_MOST = 2**63 - 1
_SHOWN_BITS = 256
_LONG = 100


@dataclass(frozen=True)
class Least:
    """Least integer for an annotated option: ``Annotated[int, Least(1)]``."""

    value: int


Size = Annotated[int, Least(1)]
"""A positive integer."""
Count = Annotated[int, Least(0)]
"""An integer of 0 or more."""


def check_types(options: Any) -> None:
    """Check the fields of a dataclass against their annotations.

    A list becomes a tuple.

    Raises:
        ValueError: A field holds another type; the message names the field, the value and the
            allowed values.
    """
    hints = _hints(options.__class__)
    for field in fields(options):
        value = getattr(options, field.name)
        hint = hints[field.name]
        if isinstance(value, list) and any(
            get_origin(member) in (tuple, Sequence) for member in _members(hint)
        ):
            value = tuple(value)
            object.__setattr__(options, field.name, value)
        _check(field.name, value, hint)


def check_arguments(function: Callable[..., object], values: Mapping[str, object]) -> None:
    """Check arguments (such as ``locals()``) against the annotations of a function.

    Values that are no parameters of the function are ignored.

    Raises:
        ValueError: As for ``check_types``.
    """
    parameters = inspect.signature(function).parameters
    for name, hint in _hints(function).items():
        if (
            name in values
            and name in parameters
            and parameters[name].kind is not inspect.Parameter.VAR_KEYWORD
        ):
            _check(name, values[name], hint)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"``, or "" if no known name is close."""
    matches = difflib.get_close_matches(name[:_LONG], list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def shown(value: object) -> str:
    """Return a value as messages show it: short, regardless of its type."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"(an integer of {value.bit_length()} bits)"
    printer = reprlib.Repr()
    printer.maxstring = printer.maxother = _LONG
    try:
        return printer.repr(value)
    except Exception:  # a user's class may have a faulty repr
        return f"(a {type(value).__name__})"


# Cached: the annotations of an existing class do not change.
@functools.cache
def _hints(annotated: Callable[..., object]) -> dict[str, Hint]:
    return get_type_hints(annotated, include_extras=True)


def _check(name: str, value: object, hint: Hint) -> None:
    if _fits(value, hint):
        return
    raise ValueError(f"{name}={shown(value)} must be {_words(hint)}{_meant(value, hint)}")


def _meant(value: object, hint: Hint) -> str:
    if not isinstance(value, str):
        return ""
    if _fits((value,), hint) or _fits([value], hint):
        return f"; did you mean ({shown(value)},)?"
    literals = [member for member in _members(hint) if get_origin(member) is Literal]
    choices = [choice for member in literals for choice in get_args(member)]
    return nearest(value, [choice for choice in choices if isinstance(choice, str)])


def _fits(value: Any, hint: Hint) -> bool:
    origin = get_origin(hint)
    arguments = get_args(hint)
    if hint is Any:
        return True
    if hint is types.NoneType:
        return value is None
    if len(choices := _members(hint)) > 1:
        return any(_fits(value, choice) for choice in choices)
    if origin is Annotated:
        return _fits(value, arguments[0]) and value >= arguments[1].value
    if origin is Literal:
        return any(isinstance(value, type(choice)) and value == choice for choice in arguments)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and -_MOST <= value <= _MOST
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool) and _is_finite(value)
    if is_typeddict(hint):
        items = _hints(hint)
        return (
            isinstance(value, Mapping)
            and set(value) == set(items)
            and all(_fits(value[key], items[key]) for key in items)
        )
    if origin is not None:
        return _fits_container(value, origin, arguments)
    return isinstance(value, hint)


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _fits_container(value: Any, origin: Hint, arguments: tuple[Hint, ...]) -> bool:
    if origin is Callable:
        return callable(value)
    if not isinstance(value, origin) or isinstance(value, str | bytes | bytearray):
        return False
    if isinstance(value, Mapping):
        key, item = arguments
        return all(_fits(k, key) and _fits(v, item) for k, v in value.items())
    if origin is tuple and Ellipsis not in arguments:
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    return all(_fits(item, arguments[0]) for item in value)


def _members(hint: Hint) -> tuple[Hint, ...]:
    """Return the members of a union; any other annotation is its own member."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _words(hint: Hint) -> str:
    """Return a description of an annotation for messages."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if len(choices := _members(hint)) > 1:
        return ", or ".join(map(_words, choices))
    if origin is Annotated:
        least = arguments[1].value
        return "a positive integer" if least == 1 else f"an integer of at least {least}"
    if origin is Literal:
        if len(arguments) > 1:
            return f"one of {', '.join(map(repr, arguments))}"
        return repr(arguments[0])
    if origin is Callable:
        return "a function"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping of {_many(arguments[0])} to {_many(arguments[1])}"
    if origin is tuple and Ellipsis not in arguments:
        return f"a list of {len(arguments)} {_many(arguments[0])}"
    if origin is not None:
        return f"a list of {_many(arguments[0])}"
    if is_typeddict(hint):
        return f"a mapping of {', '.join(f'{key} ({_words(item)})' for key, item in _hints(hint).items())}"
    plain = {
        int: "an integer",
        float: "a finite number",
        bool: "True or False",
        str: "text",
        types.NoneType: "None",
    }
    return plain.get(hint) or f"a {hint.__name__}"


def _many(hint: Hint) -> str:
    if get_origin(hint) is Annotated:
        return "positive integers" if Least(1) in get_args(hint) else _many(get_args(hint)[0])
    return {int: "integers", float: "numbers", str: "texts", bool: "True or False"}.get(
        hint
    ) or f"({_words(hint)})"


def check_integer(name: str, value: object, *, least: int = 1, most: int | None = None) -> None:
    """Raise ValueError, naming the field, unless ``value`` is an integer in range.

    The range is from ``least`` to ``most``, or without upper limit.
    """
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    valid = (
        isinstance(value, int)
        and not isinstance(value, bool)
        and value >= least
        and (most is None or value <= most)
    )
    if not valid:
        raise ValueError(f"{name}={value!r} must be an integer {limits}")


def check_fraction(name: str, value: float, *, note: str = "") -> None:
    """Raise ValueError, naming the field, unless 0 < ``value`` <= 0.5."""
    if not 0 < value <= 0.5:
        raise ValueError(f"{name}={value!r} must be greater than 0 and at most 0.5{note}")


def check_writable_folder(folder: Path, what: str) -> None:
    """Check that ``folder`` can be written or made.

    Args:
        folder: The folder, which need not exist.
        what: Field and value, for the message.

    Raises:
        ValueError: The nearest existing parent is a file or is not writable.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(
            f"{what}: {existing} is a file, so no folder can be created there. Give another folder"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{what}: {existing} is not writable. Give a folder with write permission")
