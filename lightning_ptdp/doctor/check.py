"""Result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Check", "Status", "enough", "failed", "ok", "warning"]


class Status(StrEnum):
    """Severity of a result."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at.

    Attributes:
        subject: What, in a word or two.
        status: Whether training can work with it.
        found: What was seen.
        mend: What would help; "" where nothing has to.
    """

    subject: str
    status: Status
    found: str
    mend: str = ""


def ok(subject: str, found: str) -> Check:
    """Nothing to do."""
    return Check(subject=subject, status=Status.OK, found=found)


def warning(subject: str, found: str, mend: str) -> Check:
    """Training works, but not as it could."""
    return Check(subject=subject, status=Status.WARNING, found=found, mend=mend)


def enough(is_enough: bool, subject: str, found: str, mend: str) -> Check:
    """Nothing to do if what was found is enough, else a warning."""
    return ok(subject, found) if is_enough else warning(subject, found, mend)


def failed(subject: str, found: str, mend: str) -> Check:
    """Training cannot work."""
    return Check(subject=subject, status=Status.FAILED, found=found, mend=mend)
