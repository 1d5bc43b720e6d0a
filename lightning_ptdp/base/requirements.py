"""Checks of installed versions against the ranges in this package's own metadata."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lightning_ptdp.base.errors import PTDPError

DISTRIBUTION = "lightning-ptdp"
_FOR_DEVELOPERS = ("test", "docs")
_IN_A_STEP = (DISTRIBUTION, "torch", "lightning", "pytorch-lightning", "transformers", "peft")


class RequirementError(PTDPError, ImportError):
    """A library is missing, outside the declared range, or of another version than on rank 0.

    The message ends with what to install.
    """


@dataclass(frozen=True, kw_only=True)
class Declared:
    """One library that the package depends on.

    Attributes:
        name: Name of the distribution, such as "torch".
        versions: Range of versions that works.
        extra: Extra that installs it; "" if every installation does.
    """

    name: str
    versions: SpecifierSet
    extra: str

    @property
    def range(self) -> str:
        """Return the range as text, the lower bound first."""
        return ",".join(sorted(map(str, self.versions), reverse=True))

    @property
    def command(self) -> str:
        """Return the command that installs a version in the range."""
        return f"pip install '{self.name}{self.range}'"

    @property
    def missing(self) -> str:
        """Return the message for a library that is not installed."""
        return (
            f"{self.name} is not installed. {DISTRIBUTION} needs {self.range}. Run: {self.command}"
        )

    def allows(self, version: str) -> bool:
        """Return True if ``version`` is in the range; nightly builds count as releases."""
        return self.versions.contains(version, prereleases=True)


def read_declared(lines: Sequence[str] | None = None) -> tuple[Declared, ...]:
    """Return the libraries that users need, from ``Requires-Dist`` lines.

    If ``lines`` is None, the lines of the installed package are used. A checkout that is not
    installed has no metadata and declares nothing.
    """
    if lines is None:
        try:
            lines = metadata.requires(DISTRIBUTION) or []
        except metadata.PackageNotFoundError:
            return ()
    libraries = []
    for requirement in map(Requirement, lines):
        extra = _extra(requirement)
        if extra not in _FOR_DEVELOPERS:
            libraries.append(
                Declared(name=requirement.name, versions=requirement.specifier, extra=extra)
            )
    return tuple(libraries)


def find_problem(declared: Declared, installed: Callable[[str], str] | None = None) -> str | None:
    """Return the fault of a library's installed version, and the command that fixes it.

    The result is None if there is no fault.

    Args:
        declared: The library.
        installed: Returns the version of a distribution, or raises ``PackageNotFoundError``;
            default: ``metadata.version``.
    """
    try:
        version = (installed or metadata.version)(declared.name)
    except metadata.PackageNotFoundError:
        return declared.missing
    if declared.allows(version):
        return None
    return (
        f"{declared.name} {version} is installed, but {DISTRIBUTION} needs {declared.range}. "
        f"Run: {declared.command}"
    )


def check_installed(*names: str) -> None:
    """Check the installed versions of the libraries ``names``.

    A name that is not declared is not checked.

    Raises:
        RequirementError: One is missing or outside the declared range.
    """
    for declared in _declared():
        if declared.name in names:
            problem = find_problem(declared)
            if problem is not None:
                raise RequirementError(problem, name=declared.name)


def versions_that_matter() -> dict[str, str]:
    """Return the versions that must be equal in all processes of a run.

    Local parts, such as "+cu130", are left out.
    """
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in _IN_A_STEP:
        try:
            found[name] = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return found


def check_python(version: str | None = None) -> None:
    """Check the version of Python (default: of this interpreter) against ``Requires-Python``.

    Raises:
        RequirementError: It is outside the range.
    """
    version = version or platform.python_version()
    try:
        needed = metadata.metadata(DISTRIBUTION)["Requires-Python"] or ""
    except metadata.PackageNotFoundError:
        return
    if not SpecifierSet(needed).contains(version, prereleases=True):
        raise RequirementError(
            f"This is Python {version}, but {DISTRIBUTION} needs {needed}. Run: "
            f"python{needed.lstrip('>=')} -m venv .venv"
        )


def check_core() -> None:
    """Check the interpreter, torch and Lightning.

    Raises:
        RequirementError: One is outside the declared range.
    """
    check_python()
    check_installed("torch", "lightning")


def check_at_import() -> None:
    """Check the core when the package is imported, except if an error would do harm.

    ``import torch`` loads this package's entry point, and an error there would break torch for
    every program. The command line reports the error itself, so that ``ptdp doctor`` still runs.

    Raises:
        RequirementError: As in ``check_core``.
    """
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    is_importing_torch = getattr(spec, "_initializing", False)
    # While `python -m package` looks for the package, sys.argv[0] is "-m".
    is_command_line = Path(sys.argv[0]).name in ("ptdp", "-m") if sys.argv else False
    if not is_importing_torch and not is_command_line:
        check_core()


def check_url(url: str) -> None:
    """Check that fsspec has the library for a URL such as ``s3://bucket/last.ckpt``.

    Raises:
        RequirementError: The library is missing, or there is none for such URLs.
    """
    protocol = url.partition("://")[0]
    if protocol in _WITHOUT_FSSPEC:
        return
    try:
        import_module("fsspec").get_filesystem_class(protocol.rpartition("::")[2])
    except ImportError as error:
        name = getattr(error.__cause__, "name", None) or getattr(error, "name", None) or protocol
        package = name.partition(".")[0]
        extras = [f"'{DISTRIBUTION}[{one.extra}]'" for one in _declared() if one.name == package]
        raise RequirementError(
            f"{url} needs {name}, which is not installed. Run: pip install "
            f"{next(iter(extras), package)}",
            name=name,
        ) from error
    except ValueError as error:
        raise RequirementError(
            f"{url}: fsspec does not support URLs with the protocol {protocol}://. Copy the "
            "file, and give the path of the copy"
        ) from error


_WITHOUT_FSSPEC = ("http", "https")
"""Protocols that Lightning reads by itself."""


def import_optional(name: str) -> Any:
    """Return the module of an optional library, after a check of its version.

    Raises:
        RequirementError: It is missing or outside the declared range.
    """
    check_installed(name)
    return import_module(name)


def _extra(requirement: Requirement) -> str:
    """Return the first extra for which the requirement's marker holds.

    The result is "" if the marker holds without an extra.
    """
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        return ""
    extras = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    return next(
        (extra for extra in extras if requirement.marker.evaluate({"extra": extra})),
        _FOR_DEVELOPERS[0],
    )


@lru_cache(maxsize=1)
def _declared() -> tuple[Declared, ...]:
    return read_declared()
