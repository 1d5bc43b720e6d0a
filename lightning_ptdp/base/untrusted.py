"""Reading of untrusted files: their claims are compared with their content before use.

Every reader of this package uses these functions. It turns the ``ValueError`` or ``OSError`` into
its own error, which names the fix.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

MOST_BYTES = 1 << 24
MOST_SETTINGS = 1 << 17
"""Values of a configuration; some programs take quadratic time in their number."""
_MOST_TOKENIZER = 1 << 27  # bytes of a file; the largest vocabularies take a quarter of it
# Empty lists take 64 bytes each; the index of a large model has half as many values.
_MOST_VALUES = 1 << 21
_MOST_DEPTH = 64
_MOST_NAME = 255  # bytes: limit of every file system


def inside(folder: str | Path, name: object) -> Path:
    """Return the path of a file that another file names, in ``folder`` or below it.

    Raises:
        ValueError: The name is not a relative path that stays inside, or the path contains a link.
    """
    if not isinstance(name, str) or not _is_relative(name):
        raise ValueError(f"{_short(name)} is not the name of a file inside the folder")
    path = Path(folder)
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            raise ValueError(f"{path} is a link. Replace it with the file itself")
    return path


def hub_blobs(folder: str | Path) -> list[Path]:
    """Return the ``blobs`` folder of huggingface_hub's cache.

    The list is empty if ``folder`` is not in a snapshot of a cache. The files of a snapshot are
    links to blobs.
    """
    real = Path(os.path.realpath(folder))
    caches = [parent.parent for parent in (real, *real.parents) if parent.name == "snapshots"]
    return [cache / "blobs" for cache in caches[:1] if not (cache / "blobs").is_symlink()]


def regular_size(path: str | Path, *, linked: Sequence[Path] | None = None) -> int:
    """Return the size of a regular file in bytes, without opening it.

    Opening a pipe would wait for a writer.

    Args:
        path: The file.
        linked: Folders to which a link may lead in addition to its own folder; None for all.

    Raises:
        OSError: It is missing, is no regular file (a pipe, a device, a folder), or is a link to
            another folder.
    """
    if linked is not None and os.path.islink(path):
        target = Path(os.path.realpath(path))
        if not any(
            target.parent == Path(os.path.realpath(folder))
            for folder in (Path(path).parent, *linked)
        ):
            message = (
                f"it is a link to {target}, which is outside its folder. Replace it with "
                "the file itself"
            )
            raise OSError(errno.EINVAL, message, str(path))
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return status.st_size


def read_bytes(
    path: str | Path, *, most_bytes: int = MOST_BYTES, linked: Sequence[Path] | None = None
) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: As in :func:`regular_size`.
        ValueError: It has more than ``most_bytes``.
    """
    _check_size(path, most_bytes, linked)
    with open(path, "rb") as stream:
        return stream.read(most_bytes)


def small_files(folder: str | Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files in a folder whose names match one of ``patterns``.

    Each must be a regular file of at most 128 MiB in this folder. A link may lead to another file
    of the folder, or to the blobs of the hub's cache that contains the folder.

    Raises:
        OSError: One of them is no regular file, or a link to another folder.
        ValueError: One of them is larger.
    """
    linked = hub_blobs(folder)
    paths = sorted(
        {path for pattern in patterns for path in Path(folder).glob(pattern) if not path.is_dir()}
    )
    for path in paths:
        _check_size(path, _MOST_TOKENIZER, linked)
    return paths


def read_files(folder: str | Path, patterns: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of :func:`small_files` by name."""
    return {path.name: path.read_bytes() for path in small_files(folder, patterns)}


def read_json(
    path: str | Path, *, most_bytes: int = MOST_BYTES, linked: Sequence[Path] | None = None
) -> Any:
    """Return the JSON of a regular file; see :func:`read_bytes` and :func:`parse_json`."""
    return parse_json(read_bytes(path, most_bytes=most_bytes, linked=linked))


def check_values(data: bytes, most_values: int) -> None:
    """Refuse JSON of more than about ``most_values`` values, without parsing it.

    Raises:
        ValueError: There are more values.
    """
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > most_values:
        raise ValueError(f"it has about {values} values, more than the limit of {most_values}")


def parse_json(
    data: bytes, *, most_values: int = _MOST_VALUES, most_depth: int = _MOST_DEPTH
) -> Any:
    """Return the content of JSON with at most ``most_values`` values, ``most_depth`` deep.

    Raises:
        ValueError: It is not such JSON.
    """
    check_values(data, most_values)
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError(f"its brackets are nested more than {most_depth} levels deep") from None
    except ValueError as error:
        raise ValueError(f"it is not valid JSON ({_short(error)})") from error
    level = [content]
    for _ in range(most_depth):
        if not level:
            break
        level = [entry for value in level for entry in _entries(value)]
    if any(isinstance(value, dict | list) for value in level):
        raise ValueError(f"its brackets are nested more than {most_depth} levels deep")
    return content


def reason(error: Exception) -> str:
    """Return the reason why a file is unusable, for a message.

    For a ValueError it is the text. For any other error, such as a missing key, it includes the
    type.
    """
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"[:300]


def _check_size(path: str | Path, most_bytes: int, linked: Sequence[Path] | None) -> None:
    size = regular_size(path, linked=linked)
    if size > most_bytes:
        raise ValueError(f"{Path(path).name} has {size} bytes, more than the limit of {most_bytes}")


def _is_relative(name: str) -> bool:
    plain = name.isprintable() and not set(name) & {"\\", ":"} and len(name.encode()) <= _MOST_NAME
    return (
        plain
        and PurePosixPath(name).as_posix() == name
        and name != "."
        and name[0] != "/"
        and ".." not in name.split("/")
    )


def _entries(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _short(value: object) -> str:
    """Return the beginning of a long value, enough to find it."""
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 120 else f"{text[:120]}…"
