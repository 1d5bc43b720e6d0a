"""Why a training ended: Lightning tells loggers no more than that something went wrong."""

from __future__ import annotations

__all__ = ["was_told_to_end"]

_TOLD_TO_END = (
    "KeyboardInterrupt",
    "SIGTERMException",
    "Terminated",
)  # Lightning's has two namespaces; the command line's own


def was_told_to_end(error: BaseException | None) -> bool:
    """Return True if the exception that is being handled comes from a signal. Lightning only tells
    loggers that a run failed."""
    while error is not None:
        if any(kind.__name__ in _TOLD_TO_END for kind in type(error).__mro__):
            return True
        error = error.__context__
    return False
