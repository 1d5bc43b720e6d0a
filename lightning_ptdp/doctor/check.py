"""Result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Severity of a result."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Check:
    """Result of one check.

    Attributes:
        subject: Checked subject, in a word or two.
        status: Whether training can work with it.
        found: State of the subject.
        remedy: What solves the problem; "" if there is none.
    """

    subject: str
    status: Status
    found: str
    remedy: str = ""


def ok(subject: str, found: str) -> Check:
    """Return a result that requires no action."""
    return Check(subject=subject, status=Status.OK, found=found)


def warning(subject: str, found: str, remedy: str) -> Check:
    """Return a result with which training works, but not at its best."""
    return Check(subject=subject, status=Status.WARNING, found=found, remedy=remedy)


def enough(is_enough: bool, subject: str, found: str, remedy: str) -> Check:
    """Return an ``ok`` result if ``is_enough``, else a warning."""
    return ok(subject, found) if is_enough else warning(subject, found, remedy)


def failed(subject: str, found: str, remedy: str) -> Check:
    """Return a result with which training cannot work."""
    return Check(subject=subject, status=Status.FAILED, found=found, remedy=remedy)
