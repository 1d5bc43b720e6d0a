"""Faster imports for the command line."""

from __future__ import annotations

import sys

_NOT_FOR_US = ("matplotlib", "scipy", "torchvision", "transformers")


def import_torchmetrics_alone() -> None:
    """Import torchmetrics without the optional packages that some of its metrics need.

    Lightning imports torchmetrics before anything else. The metrics that need these packages are
    missing in this process. Nothing happens if torchmetrics is already imported.
    """
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
