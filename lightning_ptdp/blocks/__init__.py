"""Passes over the repeated blocks: float8, compilation, recomputation and offload."""

__all__: list[str] = []
