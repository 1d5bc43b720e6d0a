"""Replacement and surroundings of a module's forward, and the matrix product with its deferred
weight gradient."""

__all__: list[str] = []
