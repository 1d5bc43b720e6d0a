"""Replacement and surroundings of a module's forward, and deferred weight gradients."""

from lightning_ptdp.forward.frozen_forward import frozen_forward

__all__ = ["frozen_forward"]
