"""Helpers that read and damage prepared folders."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def write_rows(path: Path, rows: Iterable[object]) -> None:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def listed(folder: Path) -> dict[str, object]:
    """Return the files that the manifest lists."""
    files: dict[str, object] = json.loads((folder / "manifest.json").read_text())["files"]
    return files


def with_manifest(folder: Path, **changes: object) -> None:
    """Change values of the manifest and update its digest."""
    values = {**json.loads((folder / "manifest.json").read_text()), **changes}
    del values["sha256"]
    seal = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**values, "sha256": seal}))
