"""Reason of a training's end.

Lightning only tells loggers whether the training was a success."""

from __future__ import annotations

__all__ = ["was_told_to_end"]

# Lightning's exception has two namespaces; Terminated is the command line's.
_TOLD_TO_END = (
    "KeyboardInterrupt",
    "SIGTERMException",
    "Terminated",
)


def was_told_to_end(error: BaseException | None) -> bool:
    """Return True if the exception that is being handled comes from a signal.

    Lightning only tells loggers that a run failed."""
    while error is not None:
        if any(kind.__name__ in _TOLD_TO_END for kind in type(error).__mro__):
            return True
        error = error.__context__
    return False
