"""Error of a verification."""

from __future__ import annotations

from lightning_ptdp.errors import PTDPError

__all__ = ["VerificationError"]


class VerificationError(PTDPError, RuntimeError):
    """A training of the verification failed, or a layout differs from one process."""
