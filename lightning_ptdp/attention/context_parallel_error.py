"""Exception of context parallelism."""

from __future__ import annotations

from lightning_ptdp.base.errors import PTDPError

__all__ = ["ContextParallelError"]


class ContextParallelError(PTDPError, RuntimeError):
    """The model's forward did something that a slice of the sequence does not support.

    The message names the operation and the remedy.
    """
