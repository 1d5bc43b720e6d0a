"""What is installed, compared with what the package's own metadata ask for."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lightning_ptdp.doctor.check import Check, failed, ok, warning

__all__ = ["check_entry_points", "check_packages", "check_python", "check_recipes"]

_DISTRIBUTION = "lightning-ptdp"
# Extras for those who work on the package itself.
_NOT_FOR_USERS = ("test", "docs")


def check_python(required: str | None = None, version: str | None = None) -> Check:
    """The interpreter's version against ``Requires-Python``."""
    version = platform.python_version() if version is None else version
    required = (metadata.metadata(_DISTRIBUTION)["Requires-Python"] or "") if required is None else required
    if SpecifierSet(required).contains(version, prereleases=True):
        return ok("python", f"{version} ({required})")
    return failed("python", f"{version}, not {required}", f"make an environment with Python {required}")


def check_packages(
    requirements: Sequence[str] | None = None, installed: Callable[[str], str] = metadata.version
) -> Iterator[Check]:
    """Every package that the metadata name, optional ones too.

    Args:
        requirements: As in ``Requires-Dist``; None: the installed package's.
        installed: Version of a distribution; raises ``PackageNotFoundError``.
    """
    for text in (metadata.requires(_DISTRIBUTION) or []) if requirements is None else requirements:
        requirement = Requirement(text)
        extra = _extra(requirement)
        if extra not in _NOT_FOR_USERS:
            yield _check_package(requirement, extra, installed)


def _check_package(requirement: Requirement, extra: str, installed: Callable[[str], str]) -> Check:
    name, wanted = requirement.name, str(requirement.specifier)
    mend = f"pip install '{_DISTRIBUTION}[{extra}]'" if extra else f"pip install '{name}{wanted}'"
    try:
        version = installed(name)
    except metadata.PackageNotFoundError:
        if extra:
            return ok(name, f"not installed; optional: {mend}")
        return failed(name, f"not installed; needed: {wanted}", mend)
    if requirement.specifier.contains(version, prereleases=True):
        return ok(name, f"{version} ({wanted})")
    return (warning if extra else failed)(name, f"{version}, not {wanted}", mend)


def _extra(requirement: Requirement) -> str:
    """The extra to which a requirement belongs, "" for none."""
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        return ""
    extras = metadata.metadata(_DISTRIBUTION).get_all("Provides-Extra") or []
    return next((extra for extra in extras if requirement.marker.evaluate({"extra": extra})), _NOT_FOR_USERS[0])


def check_entry_points(environment: Mapping[str, str]) -> Check:
    """Whether ``Trainer(strategy="ptdp")`` works in a script that does not import the package."""
    subject, mend = 'strategy="ptdp"', "import lightning_ptdp in front of the Trainer"
    names = [entry.name for entry in metadata.entry_points(group="torch.backends")]
    if "lightning_ptdp" not in names:
        return warning(subject, "the entry point is not installed", f"{mend}, or install {_DISTRIBUTION} again")
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return warning(subject, "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from registering it", mend)
    return ok(subject, "registered when torch is imported")


def check_recipes(names: Callable[[], Sequence[str]]) -> Check:
    """Whether the recipes came with the package; ``names`` lists them, or raises ``FileNotFoundError``."""
    try:
        return ok("recipes", f"{len(names())} found")
    except FileNotFoundError as error:
        return failed("recipes", str(error), f"pip install --force-reinstall {_DISTRIBUTION}")
