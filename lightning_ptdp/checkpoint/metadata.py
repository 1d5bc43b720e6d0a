"""``metadata.json``: description of a checkpoint, readable without torch, with digests."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lightning_ptdp.base.checked_json import (
    FILE_NAME,
    Json,
    Misfit,
    integer,
    list_of,
    map_of,
    number,
    one_of,
    optional,
    record,
    text,
)
from lightning_ptdp.base.untrusted import parse_json, read_json, regular_size
from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.checksums import (
    DATA_SUFFIX,
    SUMS_SUFFIX,
    Sums,
    parse_sums,
    sums_bytes,
)
from lightning_ptdp.checkpoint.remote_path import PathLike, Place, RemotePath, located
from lightning_ptdp.checkpoint.save_agreement import (
    CheckpointError,
    MissingCheckpointError,
    reading,
)
from lightning_ptdp.version import __version__

FORMAT = "lightning-ptdp checkpoint"
_MOST_JSON = 1 << 26  # bytes
MOST_SMALL = 1 << 28
"""Limit of any other small file in bytes."""
FORMAT_VERSION = 4
METADATA_FILE, INDEX_FILE, STATE_FILE = "metadata.json", "index.json", "state.json"
README_FILE = "README.txt"
_STORED = re.compile(r"bool|(u?int|b?float|complex)(8|16|32|64|128)(_e\w+)?")
DTYPES: Mapping[str, torch.dtype] = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and _STORED.fullmatch(name)
}
"""The dtypes that a checkpoint can store, by name."""

# torch's limit of dimensions, and a number of elements whose bytes can be counted in 64 bits.
_MOST_DIMENSIONS, _MOST_ELEMENTS = (64, 2**56)
_LAST_SECOND = 253402300799.0  # end of the year 9999


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Shape and dtype of a full tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the size of the values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size of a file in bytes, and its sha256.

    The sha256 is None for a file of tensors, which has its block sums in another file.
    """

    size: int
    sha256: str | None = None


def _package_versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "lightning-ptdp": __version__,
        "lightning": importlib.metadata.version("lightning"),
        "torch": torch.__version__,
    }


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """The content of ``metadata.json``.

    Attributes:
        run: Facts about the run from the writer, such as the layout.
        packages: Versions of Python and of the packages that wrote the checkpoint.
        tensors: Every full tensor by its global name.
        files: Every other file of the folder by its name.
        created: Time of writing in seconds since 1970, which orders checkpoints. It is later than
            that of every older checkpoint in the folder, even if the clock was set back
            (save_folders.py).
        format_version: Version of the format.
        folder: Folder of the other files; "" for that of ``metadata.json``. In object storage every
            save has a new one (save_folders.py).
    """

    run: Mapping[str, Json]
    packages: Mapping[str, str] = field(default_factory=_package_versions)
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    created: float
    format_version: int = FORMAT_VERSION
    folder: str = ""

    def folder_in(self, checkpoint: Place) -> Place:
        """Return the folder of the files other than ``metadata.json``."""
        return checkpoint / self.folder if self.folder else checkpoint

    @property
    def aliases(self) -> Mapping[str, str]:
        """Return the model's names that are tied to a stored one: name -> stored name."""
        return self.run.get("aliases") or {}

    def names(self, prefix: str) -> set[str]:
        """Return the global names that begin with ``prefix``."""
        return {name for name in self.tensors if name.startswith(prefix)}


def write_metadata(checkpoint: Place, metadata: CheckpointMetadata) -> None:
    """Write ``metadata.json``, with a digest of itself, into an otherwise complete checkpoint.

    Raises:
        CheckpointError: The content could not be read back.
    """
    content = {
        "format": FORMAT,
        "version": metadata.format_version,
        # A checkpoint in the folder may have a time in the far future.
        "created": min(metadata.created, _LAST_SECOND),
        "run": metadata.run,
        **({"folder": metadata.folder} if metadata.folder else {}),
        "packages": metadata.packages,
        "files": {name: vars(entry) for name, entry in sorted(metadata.files.items())},
        "tensors": {
            name: {"shape": entry.shape, "dtype": str(entry.dtype).removeprefix("torch.")}
            for name, entry in metadata.tensors.items()
        },
    }
    with reading(checkpoint / METADATA_FILE, "could not be read back"):
        content = _plain(content)
        _parsed(content)
        text = json.dumps({**content, "sha256": _digest(content)}, indent=1).encode()
        if len(text) > _MOST_JSON:
            raise ValueError(f"it has {len(text)} bytes, more than the limit of {_MOST_JSON}")
    write_small(checkpoint / METADATA_FILE, text)


def write_small(path: Place, content: bytes) -> FileEntry:
    """Write a file other than the tensors', and return its entry."""
    with files.open_synced(path) as stream:
        stream.write(content)
    return FileEntry(size=len(content), sha256=files.sha256(content))


def check_json(run: Mapping[str, Json]) -> None:
    """Raise a CheckpointError that names the key of ``run`` that JSON cannot represent."""
    for key, value in run.items():
        try:
            json.dumps({key: value}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"metadata[{key!r}] = {value!r} cannot be written as JSON ({error})"
            ) from error
    try:
        _run(_plain(run))
    except ValueError as error:
        raise CheckpointError(f"metadata: {error}") from error


def read_metadata(path: PathLike) -> CheckpointMetadata:
    """Return the content of ``metadata.json`` after checks.

    The file must be undamaged and of a known version, and the files that it lists must exist.

    Raises:
        CheckpointError: ``path`` is not a checkpoint, is damaged, has a newer format, or lacks
            files.
    """
    checkpoint = located(path)
    metadata = stated_metadata(checkpoint)
    folder = metadata.folder_in(checkpoint)
    # In object storage, one listing shows all sizes.
    is_remote = isinstance(folder, RemotePath)
    present = {entry.name: entry for entry in folder.iterdir()} if is_remote else {}
    for name, entry in metadata.files.items():
        _check_file(present.get(name, folder / name), entry.size)
    return metadata


def stated_metadata(checkpoint: Place) -> CheckpointMetadata:
    """Return the content of ``metadata.json``; the files that it lists may be damaged.

    Raises:
        CheckpointError: As in ``read_metadata``, but for these files.
    """
    with reading(checkpoint / METADATA_FILE):
        return _parsed(_content(checkpoint))


def read_verified(
    folder: Place, metadata: CheckpointMetadata, name: str, *, most: int | None = MOST_SMALL
) -> bytes:
    """Return the content of a small file, compared with its digest.

    The file may have at most ``most`` bytes (None: any number).

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    entry = metadata.files.get(name)
    if entry is None:
        raise CheckpointError(f"{folder} is damaged: {METADATA_FILE} does not list {name}")
    if isinstance(folder, Path):  # In object storage, the content shows its size.
        _check_file(folder / name, entry.size)
    if most is not None and entry.size > most:
        raise CheckpointError(
            f"{folder / name} is damaged: it has {entry.size} bytes, more than the plausible "
            f"limit of {most}"
        )
    file = folder / name
    if isinstance(file, RemotePath):
        file = RemotePath(file.url, entry.size)  # allows the time that so many bytes need
    content = file.read_bytes()
    if files.sha256(content) != entry.sha256:
        raise CheckpointError(
            f"{folder / name} is damaged: its sha256 differs from the one in {METADATA_FILE}"
        )
    return content


def read_sums(folder: Place, metadata: CheckpointMetadata, name: str) -> Sums:
    """Return the checksums of a file of tensors, for :func:`open_summed`.

    Raises:
        CheckpointError: The file of checksums is missing or damaged.
    """
    if name not in metadata.files:
        raise CheckpointError(f"{folder} is damaged: {METADATA_FILE} does not list {name}")
    size = metadata.files[name].size
    sums = Path(name).stem + SUMS_SUFFIX
    content = read_verified(folder, metadata, sums, most=sums_bytes(size))
    with reading(folder / sums):
        return parse_sums(content, size=size)


def _content(folder: Place) -> dict[str, Json]:
    """Return the JSON object of a folder, which must be undamaged and of a known version."""
    file = folder / METADATA_FILE
    if not file.is_file():
        raise (CheckpointError if folder.exists() else MissingCheckpointError)(
            _not_a_checkpoint(folder)
        )
    if isinstance(file, Path):
        content = read_json(file, most_bytes=_MOST_JSON, linked=())
    elif (size := file.size()) <= _MOST_JSON:
        content = parse_json(RemotePath(file.url, size).read_bytes())
    else:
        raise CheckpointError(f"{file} is damaged: it has more than {_MOST_JSON} bytes")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{file} is damaged, or is not the metadata of a {FORMAT}")
    version = content.get("version")
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has format version {version}, but this lightning-ptdp reads version "
            f"{FORMAT_VERSION}. Install the release that wrote it, or a newer one"
        )
    if content.pop("sha256", None) != _digest(content):
        raise CheckpointError(
            f"{file} is damaged (or was edited): its sha256 differs from the one that it contains"
        )
    return content


def _parsed(content: dict[str, Json]) -> CheckpointMetadata:
    """Return the content of ``metadata.json`` if it is consistent.

    Raises:
        Misfit: The content is not consistent.
    """
    fields = _FIELDS(content)
    del fields["format"]
    metadata = CheckpointMetadata(format_version=fields.pop("version"), **fields)
    if INDEX_FILE not in metadata.files:
        raise Misfit(f"does not list {INDEX_FILE}", "files")
    for name, file in metadata.files.items():
        if (file.sha256 is None) != name.endswith(DATA_SUFFIX):
            raise Misfit(
                "is missing" if file.sha256 is None else "must not be present",
                f"files.{name}.sha256",
            )
    stored = sum(file.size for name, file in metadata.files.items() if name.endswith(DATA_SUFFIX))
    if (needed := sum(entry.num_bytes for entry in metadata.tensors.values())) > stored:
        raise Misfit(f"need {needed} bytes, but the files of tensors have {stored}", "tensors")
    return metadata


def _run(value: Json) -> dict[str, Json]:
    """Return the facts about the run, after checks of those that this package reads."""
    _RUN(value)
    return value


def _entry(value: Json) -> TensorEntry:
    entry = TensorEntry(**_ENTRY(value))
    if math.prod(max(extent, 1) for extent in entry.shape) > _MOST_ELEMENTS:
        raise Misfit(f"is {list(entry.shape)}, which is larger than any file can be", ".shape")
    return entry


_RUN = record(
    others=True,
    aliases=optional(map_of(text())),
    epoch=optional(integer()),
    global_step=optional(integer()),
)
_ENTRY = record(
    shape=list_of(integer(most=_MOST_ELEMENTS), most=_MOST_DIMENSIONS),
    dtype=one_of(DTYPES, "a dtype that can be stored"),
)
_FILE = record(size=integer(), sha256=optional(text(r"[0-9a-f]{64}", "a sha256")))
_FOLDER = text(files.SAVE_NAME.pattern, "the folder of a save")
_FIELDS = record(
    format=text(),
    version=integer(FORMAT_VERSION, FORMAT_VERSION),
    created=number(0.0, _LAST_SECOND),
    run=_run,
    packages=map_of(text()),
    files=map_of(
        lambda value: FileEntry(**_FILE(value)),
        key=text(FILE_NAME, "the name of a file in this folder"),
    ),
    tensors=map_of(_entry, key=text()),
    folder=lambda value: "" if value is None else _FOLDER(value),
)


def _not_a_checkpoint(folder: Place) -> str:
    if folder.is_dir():
        return f"{folder} is not a checkpoint, or is incomplete: it has no {METADATA_FILE}"
    if folder.exists():
        return (
            f"{folder} is a file, such as one written by Lightning. ptdp and "
            "load_from_checkpoint can read it, but this needs a folder with a "
            f"{METADATA_FILE}, as PTDPStrategy(checkpoint_format='folder') writes it"
        )
    if isinstance(folder, RemotePath):
        return f"{folder} does not exist"
    saves = [str(entry) for entry in files.leftovers(folder) if (entry / METADATA_FILE).is_file()]
    hint = f". An interrupted save left {' and '.join(saves)}. Rename one of them" if saves else ""
    return f"{folder} does not exist{hint}"


def _check_file(file: Place, size: int) -> None:
    if not (os.path.lexists(file) if isinstance(file, Path) else file.exists()):
        raise CheckpointError(f"{file.parent} is damaged: {file.name} is missing")
    with reading(file):
        actual = regular_size(file, linked=()) if isinstance(file, Path) else file.size()
    if actual != size:
        raise CheckpointError(f"{file} is damaged: it has {actual} bytes instead of {size}")


def _plain(value: Json) -> Json:
    """Return a value as it is read back from the file: keys are strings, tuples are lists.

    The digest is computed from this form.
    """
    return parse_json(json.dumps(value, allow_nan=False).encode())


def _digest(content: Mapping[str, Json]) -> str:
    return files.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
