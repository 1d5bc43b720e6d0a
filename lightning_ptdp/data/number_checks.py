"""Checks of numbers that a user typed."""

from __future__ import annotations


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
