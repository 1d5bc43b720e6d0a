"""Checks of the installation against the package's own metadata."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata

from lightning_ptdp.base import requirements
from lightning_ptdp.base.requirements import (
    DISTRIBUTION,
    RequirementError,
    find_problem,
    read_declared,
)
from lightning_ptdp.doctor.check import Check, failed, ok, warning

__all__ = ["check_entry_points", "check_packages", "check_python", "check_recipes"]


def check_python(version: str | None = None) -> Check:
    """Compare the interpreter's version with ``Requires-Python``.

    Args:
        version: Version to compare; None means this interpreter's.
    """
    try:
        requirements.check_python(version)
    except RequirementError as error:
        found, _, mend = str(error).partition(". Run: ")
        return failed("python", found, mend)
    return ok("python", version or platform.python_version())


def check_packages(
    lines: Sequence[str] | None = None, installed: Callable[[str], str] = metadata.version
) -> Iterator[Check]:
    """Compare every library in the metadata, including optional ones, with its version range.

    Args:
        lines: Lines as in ``Requires-Dist``; None means those of the installed package.
        installed: Returns the version of a distribution, or raises ``PackageNotFoundError``.
    """
    for declared in read_declared(lines):
        name = declared.name
        problem = find_problem(declared, installed)
        if problem is None:
            yield ok(name, f"{installed(name)} ({declared.range})")
        elif problem == declared.missing and declared.extra:
            yield ok(name, f"not installed; optional: {declared.command}")
        else:
            found, _, mend = problem.rpartition(". Run: ")
            yield (warning if declared.extra else failed)(name, found, mend)


def check_entry_points(environment: Mapping[str, str]) -> Check:
    """Check that ``Trainer(strategy="ptdp")`` works without an import of this package."""
    subject, mend = 'strategy="ptdp"', "import lightning_ptdp before creating the Trainer"
    names = [entry.name for entry in metadata.entry_points(group="torch.backends")]
    if "lightning_ptdp" not in names:
        return warning(
            subject, "the entry point is not installed", f"{mend}, or install {DISTRIBUTION} again"
        )
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return warning(
            subject, "TORCH_DEVICE_BACKEND_AUTOLOAD=0 prevents torch from registering it", mend
        )
    return ok(subject, "registered when torch is imported")


def check_recipes(names: Callable[[], Sequence[str]]) -> Check:
    """Check that the recipes are installed.

    Args:
        names: Returns their names, or raises ``FileNotFoundError``.
    """
    try:
        return ok("recipes", f"{len(names())} found")
    except FileNotFoundError as error:
        return failed("recipes", str(error), f"pip install --force-reinstall {DISTRIBUTION}")
