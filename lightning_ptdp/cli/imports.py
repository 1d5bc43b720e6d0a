"""Faster imports for the command line."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["import_torchmetrics_alone", "uncollected"]

_NOT_FOR_US = ("matplotlib", "scipy", "torchvision", "transformers")


@contextmanager
def uncollected() -> Iterator[None]:
    """Imports make objects that stay: to look through all of them for garbage again and again is a
    fifth of their time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def import_torchmetrics_alone() -> None:
    """Import torchmetrics, which Lightning imports first of all, as where the packages are not
    installed that some of its metrics take: in this process it then lacks those metrics. Nothing
    where it is imported already."""
    from unittest.mock import patch

    from lightning_utilities.core import imports

    class Requirement(imports.RequirementCache):
        def __bool__(self) -> bool:
            return not str(self.requirement).startswith(_NOT_FOR_US) and super().__bool__()

    def is_available(name: str) -> bool:
        return name not in _NOT_FOR_US and available(name)

    available = imports.package_available
    if "torchmetrics" not in sys.modules:
        with (
            patch.object(imports, "RequirementCache", Requirement),
            patch.object(imports, "package_available", is_available),
        ):
            import torchmetrics  # noqa: F401
