"""Base class of this package's errors."""

__all__ = ["PTDPError"]


class PTDPError(Exception):
    """Base class of every error of this package.

    Each error is a ``ValueError`` (or ``ImportError``) too if the user can mend it, and a
    ``RuntimeError`` if it depends on what happened during the run."""
