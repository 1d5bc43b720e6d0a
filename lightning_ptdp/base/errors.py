"""Base class of this package's errors."""


class PTDPError(Exception):
    """Base class of every error of this package.

    An error is also a ``ValueError`` (or ``ImportError``) if the user can fix its cause. It is also
    a ``RuntimeError`` if it depends on events of the run.
    """
