"""Module names: matching of a plan's globs, and suggestions for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase


def matches(name: str, pattern: str) -> bool:
    """Return True if the glob ``pattern`` names the module ``name``, component by component."""
    parts = name.split(".")
    globs = pattern.split(".")
    return len(parts) == len(globs) and all(
        fnmatchcase(part, glob) for part, glob in zip(parts, globs, strict=True)
    )


def nearest_names(wanted: str, modules: Iterable[str]) -> str:
    """Return the end of an error message: names of ``modules`` similar to ``wanted``."""
    names = [name for name in modules if name]
    if not names:
        return "it has no submodules"
    close = get_close_matches(wanted, names, n=3, cutoff=0.4)
    if close:
        return f"nearest names: {', '.join(close)}"
    return f"it has: {', '.join(names[:5])}" + (", ..." if len(names) > 5 else "")
