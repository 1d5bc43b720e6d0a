"""The parts of ``ci/faults.py``."""

__all__: list[str] = []
