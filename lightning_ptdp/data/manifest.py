"""The record beside a token store: what is in it, from what it was made, and the hash of every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_ptdp.data.errors import StoreError
from lightning_ptdp.data.tokenizer import Tokenizer

__all__ = ["CorpusRecord", "FileRecord", "Manifest", "SplitName", "SplitRecord", "record_files", "verify_store"]

MANIFEST_FILE = "manifest.json"
FORMAT = 1
SplitName = Literal["train", "validation"]


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size in bytes and hash of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class SplitRecord:
    """One split: its documents, its tokens (every document ends with one end token) and how a token is stored."""

    documents: int
    tokens: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class CorpusRecord:
    """The text that was read: the source as it was given, hashes of its file list and of its contents."""

    source: list[str]
    files: int
    listing: str
    documents: int
    characters: int
    content: str
    undecodable: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of ``manifest.json``.

    Attributes:
        settings: The settings that decide the contents; a store is used again only for the same ones.
        python: Version of the Python that made the store.
        corpus: The text.
        tokenizer_fingerprint: Hash of the tokenizer's pieces.
        vocabulary_size: Number of ids.
        splits: ``train`` and ``validation``.
        files: Every file of the store except the manifest, by its path in the folder.
    """

    settings: Mapping[str, Any]
    python: str
    corpus: CorpusRecord
    tokenizer_fingerprint: str
    vocabulary_size: int
    splits: Mapping[str, SplitRecord]
    files: Mapping[str, FileRecord]

    def fingerprint(self, split: SplitName) -> str:
        """A hash that is the same exactly if the split's files are."""
        parts = [f"{name} {record.sha256}" for name, record in sorted(self.files.items()) if name.startswith(f"{split}/")]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def write(self, folder: str | Path) -> None:
        """Write ``manifest.json`` into ``folder``."""
        Path(folder, MANIFEST_FILE).write_text(
            json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n", "utf-8"
        )

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """Read ``manifest.json`` from ``folder``.

        Raises:
            StoreError: It is missing, not JSON, of another format, or incomplete.
        """
        path = Path(folder, MANIFEST_FILE)
        try:
            values = json.loads(path.read_text("utf-8"))
        except FileNotFoundError as error:
            raise StoreError(f"{path} is missing: {folder} is not a prepared data folder; run `ptdp prepare`") from error
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise StoreError(f"{path} is damaged: not JSON ({error})") from error
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise StoreError(f"{path} is not of format {FORMAT}: prepare the data again with overwrite")
        try:
            nested = {
                "corpus": CorpusRecord(**values["corpus"]),
                "splits": {name: SplitRecord(**value) for name, value in values["splits"].items()},
                "files": {name: FileRecord(**value) for name, value in values["files"].items()},
            }
            return cls(**{**values, **nested})
        except (TypeError, KeyError, AttributeError) as error:
            raise StoreError(f"{path} is damaged: {error!r}") from error


def record_files(folder: str | Path) -> dict[str, FileRecord]:
    """Size and hash of every file below ``folder`` except a manifest."""
    root = Path(folder)
    paths = sorted(path for path in root.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
    return {path.relative_to(root).as_posix(): FileRecord(size=path.stat().st_size, sha256=_sha256(path)) for path in paths}


def verify_store(folder: str | Path, *, hashes: bool = True) -> Manifest:
    """Check a prepared folder against its manifest: every file is there, of its size and (unless ``hashes`` is off) its hash,
    and the tokenizer is the one whose ids are stored.

    litdata itself waits two minutes for a missing chunk and does not see a flipped byte, so this comes before it is opened.

    Raises:
        StoreError: The message names the first file that is wrong.
        TokenizerError: The tokenizer is damaged.
    """
    manifest = Manifest.read(folder)
    for name, record in manifest.files.items():
        path = Path(folder, name)
        try:
            size = path.stat().st_size
            if size != record.size:
                raise StoreError(f"{path} has {size} bytes, {record.size} were written: prepare the data again with overwrite")
            if hashes and _sha256(path) != record.sha256:
                raise StoreError(
                    f"{path} is damaged: its sha256 is not that of the manifest; prepare the data again with overwrite"
                )
        except FileNotFoundError as error:
            raise StoreError(f"{path} is missing: prepare the data again with overwrite") from error
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    tokenizer = Tokenizer.load(folder)
    if tokenizer.fingerprint != manifest.tokenizer_fingerprint:
        raise StoreError(
            f"{folder} holds tokens of tokenizer {manifest.tokenizer_fingerprint[:12]}, but its tokenizer.model is "
            f"{tokenizer.fingerprint[:12]}: another tokenizer was put in its place"
        )
    return manifest


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
