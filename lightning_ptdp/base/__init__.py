"""Utilities that are independent of training."""

__all__: list[str] = []
