"""Copies of objects on this node, for libraries that read files.

Models, corpora and single files at an address are fetched into ``~/.cache/lightning-ptdp``::

    ~/.cache/lightning-ptdp/3f2a9c1d77e4a0b2/gpt2-hf/config.json

One process per node fetches a copy, and the other processes wait for it. The folder's number is a
hash of the address and of the names, sizes and versions of its objects. A changed object is
therefore fetched again. A copy appears under its name complete or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from lightning_ptdp.base.time_limit import one_at_a_time
from lightning_ptdp.base.untrusted import inside
from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.remote_path import PathLike, Place, RemotePath, each, located
from lightning_ptdp.checkpoint.save_agreement import (
    CheckpointError,
    MissingCheckpointError,
    reading,
)

SETTING_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
MODEL_FILES = (*SETTING_FILES, "*.safetensors")
"""Files of a model's folder that are read."""
CONFIG_FILE = "config.json"
_PIECE = 16 << 20  # bytes of one request
_LIMIT_S = 3600.0  # of the wait for another process that fetches


def readable(path: PathLike) -> Place:
    """Return the place of a path; of a model's folder or a file at an address, a local copy."""
    place = located(path)
    is_copied = isinstance(place, RemotePath) and (
        place.is_file() or (place / CONFIG_FILE).is_file()
    )
    return local_copy(place, MODEL_FILES) if is_copied else place


def local_copy(path: PathLike, patterns: Iterable[str] = ("*",)) -> Path:
    """Return a path, or the copy of the object or of the objects below an address.

    Args:
        path: A path or an address.
        patterns: Patterns of the names that are fetched from a folder.

    Raises:
        MissingCheckpointError: There is no such object.
        CheckpointError: It cannot be fetched.
    """
    place = located(path)
    if isinstance(place, Path):
        return place
    wanted = {
        name: info
        for name, info in place.below().items()
        if not name or any(fnmatch(name, pattern) for pattern in patterns)
    }
    if not wanted:
        raise MissingCheckpointError(f"{place} does not exist, or has no {', '.join(patterns)}")
    number = files.sha256(repr((place.url, sorted(wanted.items()))).encode())[:16]
    copy = Path.home() / ".cache" / "lightning-ptdp" / number / place.name
    with reading(copy):
        copy.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(copy.parent, limit_s=_LIMIT_S):
            if not copy.exists():
                with files.replacing(copy) as part:
                    _fetch(place, {name: int(info["size"]) for name, info in wanted.items()}, part)
    return copy


def _fetch(place: RemotePath, sizes: dict[str, int], part: Path) -> None:
    """Fetch objects, given by their paths below ``place``, in pieces."""
    pieces = []
    for name, size in sizes.items():
        file = inside(part, name) if name else part
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "wb") as stream:
            stream.truncate(size)
        source = place / name if name else place
        pieces += [(source, file, begin, size) for begin in range(0, size, _PIECE)]

    def fetch(piece: tuple[RemotePath, Path, int, int]) -> None:
        source, file, begin, size = piece
        content = source.read_bytes(begin, min(begin + _PIECE, size))
        if len(content) != min(_PIECE, size - begin):
            raise CheckpointError(f"{source} changed while it was fetched. Try again")
        with open(file, "r+b") as stream:
            stream.seek(begin)
            stream.write(content)

    each(place, fetch, pieces)


def send(folder: Path, target: RemotePath) -> None:
    """Replace the objects at an address by the files of a folder, or the object there by a file.

    ``config.json``, without which a model's folder is not read, is the last one.

    Raises:
        StorageError: The objects cannot be written.
    """
    if folder.is_dir():
        target.remove()
    paths = [path for path in (folder, *folder.rglob("*")) if path.is_file()]
    for path in sorted(paths, key=lambda path: path.name == CONFIG_FILE):
        name = path.relative_to(folder).as_posix()
        (target if path == folder else target / name).write_bytes(path.read_bytes())
