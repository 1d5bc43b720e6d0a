"""Broken JSON, false values, paths outside a folder, and odd files for any parser."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.hostile.confined import CANARY

__all__ = ["BROKEN_JSON", "FALSE_NUMBERS", "FALSE_VALUES", "ODD_FILES", "names_outside", "put"]

BROKEN_JSON: Mapping[str, bytes] = {
    "empty": b"",
    "cut off": b'{"format": 2, "files": {"a"',
    "a list": b"[]",
    "a list of mappings": b'[{"a": 1}]',
    "a number": b"3",
    "10^30": b"1" + b"0" * 30,
    "5,000 digits": b"9" * 5000,
    "a text": b'"text"',
    "null": b"null",
    "no number": b'{"format": NaN}',
    "no text": b"\xff\xfe\x00\x01" * 20,
    "a zero byte": b"\0{}",
    "brackets": b"[" * 1_000_000,
    "closed brackets": b"[" * 50_000 + b"]" * 50_000,
    "braces": b'{"a":' * 200_000,
    "many values": b"[" + b"[]," * 3_000_000 + b"0]",
    "many keys": b"{" + b",".join(b'"%d":0' % number for number in range(700_000)) + b"}",
    "an empty mapping": b"{}",
}

FALSE_NUMBERS: Mapping[str, object] = {
    "-1": -1,
    "10^13": 10**13,
    "10^30": 10**30,
    "1e300": 1e300,
    "a half": 0.5,
    "true": True,
}
FALSE_VALUES: Mapping[str, object] = {
    **FALSE_NUMBERS,
    "null": None,
    "a text": "x",
    "a list": [],
    "a mapping": {"a": [1]},
}


def names_outside(folder: Path) -> Mapping[str, str]:
    """Return names of files of the canary or of no file, as written in a file of ``folder``."""
    secret = Path(CANARY) / "secret.bin"
    root = next(
        (parent for parent in folder.parents if (parent / CANARY).is_dir()), folder.parents[1]
    )
    up = os.path.relpath(root, folder)
    return {
        "up": f"{up}/{secret}",
        "further up": f"../{up}/{secret}",
        "up from within": f"train/../{up}/{secret}",
        "absolute": str(root / secret),
        "home": "~/.profile",
        "the folder": ".",
        "above": "..",
        "nothing": "",
        "zero": "train/chunk\0",
        "backslashes": "..\\..\\canary\\secret.bin",
        "long": "a" * 5000,
        "deep": "/".join(["a"] * 3000),
        "surrogate": "\ud800",
        "a line": "a\nb",
    }


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _sparse(path: Path) -> None:
    with open(path, "wb") as stream:
        stream.truncate(1 << 40)


def _linked(path: Path) -> None:
    root = next(parent for parent in path.parents if (parent / CANARY).is_dir())
    path.symlink_to(root / CANARY / "secret.bin")


ODD_FILES: Mapping[str, Callable[[Path], None]] = {
    "missing": lambda path: None,
    "a folder": Path.mkdir,
    "a pipe": _pipe,
    "a link": _linked,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a terabyte": _sparse,
}
"""Odd objects in place of a file."""


def put(folder: Path, files: Mapping[str, bytes | Callable[[Path], None]]) -> None:
    """Write files or odd objects in their place."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            content(path)
