"""The one exception of this room."""

from __future__ import annotations

from lightning_ptdp.base.errors import PTDPError

__all__ = ["ContextParallelError"]


class ContextParallelError(PTDPError, RuntimeError):
    """The model's forward did something that a slice of the sequence cannot honour; the message
    says what and how to mend it."""
