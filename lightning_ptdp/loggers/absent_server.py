"""Stand-in for a run on an MLflow server that does not answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_ptdp.loggers.tracking_store import SilentServerError

__all__ = ["AbsentRun", "is_unanswered"]


class AbsentRun:
    """Replacement of Lightning's logger for a server that does not answer; sends nothing."""

    experiment_id = ""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.experiment: Any = _Nothing()

    def after_save_checkpoint(self, checkpoint_callback: object) -> None:
        """Do nothing."""

    def finalize(self, status: str) -> None:
        """Do nothing."""


class _Nothing:
    """Client whose calls do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def is_unanswered(error: BaseException | None) -> bool:
    """Return True if a server gave no answer, and False if it refused the request."""
    from requests.exceptions import RequestException

    while error is not None:
        if isinstance(error, SilentServerError | RequestException):
            return True
        error = error.__cause__ or error.__context__
    return False
