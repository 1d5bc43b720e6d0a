"""Utilities that know nothing of training."""

__all__: list[str] = []
