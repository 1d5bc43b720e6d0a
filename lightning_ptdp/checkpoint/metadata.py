"""``metadata.json``: what a checkpoint holds, readable without torch, and how damage is noticed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.errors import CheckpointError, MissingCheckpointError
from lightning_ptdp.checkpoint.sums import DATA_SUFFIX, SUMS_SUFFIX, BlockSums, parse_sums
from lightning_ptdp.version import __version__

__all__ = [
    "DCP_FILE",
    "METADATA_FILE",
    "README_FILE",
    "STATE_FILE",
    "CheckpointMetadata",
    "FileEntry",
    "Json",
    "TensorEntry",
    "check_json",
    "describe_folder",
    "read_metadata",
    "read_sums",
    "read_verified",
    "write_metadata",
]

Json = Any  # what json.dumps takes: a recursive type that type checkers follow poorly

FORMAT = "lightning-ptdp checkpoint"
FORMAT_VERSION = 1
METADATA_FILE, STATE_FILE, DCP_FILE, README_FILE = "metadata.json", "state.pt", ".metadata", "README.txt"


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Shape and dtype of a full tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size of a file in bytes, and its sha256 (None for a file of tensors, whose sums by block are in a file of their own)."""

    size: int
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """The content of ``metadata.json``.

    Attributes:
        run: What the writer said of itself: the layout, for instance.
        packages: Versions of Python and of the packages that wrote the checkpoint.
        tensors: Every full tensor by its global name.
        files: Every other file of the folder by its name.
        created: When it was written, in seconds since 1970, later than what was in its folder by then, whatever the clock said
            (keeper.py): orders checkpoints.
        format_version: Version of the format.
    """

    run: Mapping[str, Json]
    packages: Mapping[str, str]
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    created: float
    format_version: int = FORMAT_VERSION

    @property
    def aliases(self) -> Mapping[str, str]:
        """The model's names that are not stored, because they are tied to one that is: name -> stored name."""
        return self.run.get("aliases", {})

    def names(self, prefix: str) -> set[str]:
        """Global names that begin with ``prefix``."""
        return {name for name in self.tensors if name.startswith(prefix)}


def describe_folder(
    folder: Path, *, run: Mapping[str, Json], tensors: Mapping[str, TensorEntry], created: float | None = None
) -> CheckpointMetadata:
    """The metadata of a folder that holds everything but ``metadata.json``, written ``created`` or (None) now."""
    found = {}
    for path in sorted(folder.iterdir()):
        digest = None if path.suffix == DATA_SUFFIX else files.sha256(path.read_bytes())
        found[path.name] = FileEntry(size=path.stat().st_size, sha256=digest)
    return CheckpointMetadata(run=run, packages=_packages(), tensors=tensors, files=found, created=created or time.time())


def write_metadata(folder: Path, metadata: CheckpointMetadata) -> None:
    """Write ``metadata.json`` with a digest of itself."""
    content = _plain(
        {
            "format": FORMAT,
            "version": metadata.format_version,
            "created": metadata.created,
            "run": metadata.run,
            "packages": metadata.packages,
            "files": {name: asdict(entry) for name, entry in metadata.files.items()},
            "tensors": {
                name: {"shape": list(entry.shape), "dtype": str(entry.dtype).removeprefix("torch.")}
                for name, entry in metadata.tensors.items()
            },
        }
    )
    text = json.dumps({**content, "sha256": _digest(content)}, indent=1)
    with files.open_synced(folder / METADATA_FILE) as stream:
        stream.write(text.encode())


def check_json(run: Mapping[str, Json]) -> None:
    """Raise a CheckpointError that names the key of ``run`` that JSON cannot hold."""
    for key, value in run.items():
        try:
            json.dumps({key: value}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"metadata[{key!r}] = {value!r} cannot be written as JSON ({error})") from error


def read_metadata(path: str | os.PathLike[str]) -> CheckpointMetadata:
    """Read and check ``metadata.json``: that it is whole, of a known version, and that the files it lists are there.

    Raises:
        CheckpointError: ``path`` is not a checkpoint, is damaged, is of a newer format, or lacks files.
    """
    folder = Path(path)
    content = _content(folder)
    metadata = CheckpointMetadata(
        created=content["created"],
        run=content["run"],
        packages=content["packages"],
        tensors={
            name: TensorEntry(shape=tuple(entry["shape"]), dtype=getattr(torch, entry["dtype"]))
            for name, entry in content["tensors"].items()
        },
        files={name: FileEntry(**entry) for name, entry in content["files"].items()},
        format_version=content["version"],
    )
    for name, entry in metadata.files.items():
        _check_file(folder / name, entry.size)
    return metadata


def read_verified(folder: Path, metadata: CheckpointMetadata, name: str) -> bytes:
    """Content of a small file, compared with its digest.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    entry = metadata.files.get(name)
    if entry is None:
        raise CheckpointError(f"{folder} is damaged: {METADATA_FILE} does not list {name}")
    _check_file(folder / name, entry.size)
    content = (folder / name).read_bytes()
    if files.sha256(content) != entry.sha256:
        raise CheckpointError(f"{folder / name} is damaged: its sha256 is not the one that {METADATA_FILE} lists")
    return content


def read_sums(folder: Path, metadata: CheckpointMetadata, name: str) -> BlockSums:
    """The checksums of a file of tensors, as :func:`open_summed` takes them.

    Raises:
        CheckpointError: The file that holds them is missing or damaged.
    """
    if name not in metadata.files:
        raise CheckpointError(f"{folder} is damaged: {METADATA_FILE} does not list {name}")
    return parse_sums(read_verified(folder, metadata, Path(name).stem + SUMS_SUFFIX), size=metadata.files[name].size)


def _content(folder: Path) -> dict[str, Json]:
    """The checked JSON object of a folder."""
    file = folder / METADATA_FILE
    if not file.is_file():
        raise (CheckpointError if folder.exists() else MissingCheckpointError)(_not_a_checkpoint(folder))
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not the metadata of a {FORMAT}, or is damaged")
    version = content.get("version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has format version {version}, this lightning-ptdp reads up to {FORMAT_VERSION}: update the package"
        )
    if content.pop("sha256", None) != _digest(content):
        raise CheckpointError(f"{file} is damaged (or was edited): its content does not have the sha256 that it names")
    return content


def _not_a_checkpoint(folder: Path) -> str:
    if folder.is_dir():
        return f"{folder} is not a checkpoint, or not a whole one: it has no {METADATA_FILE}"
    if folder.exists():
        return f"{folder} is a file; a checkpoint of this strategy is a folder with a {METADATA_FILE}"
    whole = [str(entry) for entry in files.leftovers(folder) if (entry / METADATA_FILE).is_file()]
    hint = f"; a save was interrupted and left {' and '.join(whole)}: rename one of them" if whole else ""
    return f"{folder} does not exist{hint}"


def _check_file(file: Path, size: int) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file.parent} is damaged: {file.name} is missing")
    found = file.stat().st_size
    if found != size:
        raise CheckpointError(f"{file} is damaged: it has {found} bytes instead of {size}")


def _plain(value: Json) -> Json:
    """As it comes back from the file: keys are strings, tuples are lists; what the digest is taken of."""
    return json.loads(json.dumps(value, allow_nan=False))


def _digest(content: Mapping[str, Json]) -> str:
    return files.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _packages() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "lightning-ptdp": __version__,
        "lightning": importlib.metadata.version("lightning"),
        "torch": torch.__version__,
    }
