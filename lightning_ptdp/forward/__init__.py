"""Replacement and surroundings of a module's forward, and deferred weight gradients."""

__all__: list[str] = []
