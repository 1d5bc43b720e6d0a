"""The record of a token store: its contents, its origin, and the hash of every file.

A manifest from another machine is not trusted. Names may only lead to files inside the folder,
numbers are compared with the stored data, and the record has a digest of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_ptdp.base.option_types import Count, check_types
from lightning_ptdp.base.untrusted import inside, read_json
from lightning_ptdp.checkpoint.files import sha256
from lightning_ptdp.data.data_error import StoreError, reading
from lightning_ptdp.data.huggingface_tokenizer import TOKENIZER_FOLDER, load_tokenizer
from lightning_ptdp.data.token_store import INDEX_FILE, MARKS, ChunkMap, TokenType, read_chunks
from lightning_ptdp.data.tokenizer import MODEL_FILE, RECORD_FILE, Tokenizer

MANIFEST_FILE = "manifest.json"
FORMAT = 3
_REMEDY = "Prepare the data again with overwrite, or copy the folder again"
_SHA256 = re.compile("[0-9a-f]{64}")

Form = Literal["text", "chat", "preference", "image_chat"]
"""Text: documents, each followed by its end token. Chat: conversations, with marks of tokens.

Preference: pairs of conversations, each like those of chat. Image chat: conversations, and a list
of their images."""
_READ_BY = {
    "text": "TextDataModule",
    "chat": "ChatDataModule",
    "preference": "PreferenceDataModule",
    "image_chat": "ImageChatDataModule",
}
SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, ...] = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size in bytes and hash of one file."""

    size: Count
    sha256: str


@dataclass(frozen=True, kw_only=True)
class SplitRecord:
    """Documents (or conversations) and tokens of one split, and the type of a stored token.

    The end token of a document is counted.
    """

    documents: Count
    tokens: Count
    dtype: TokenType


@dataclass(frozen=True, kw_only=True)
class CorpusRecord:
    """The text that was read: the given source, and hashes of its file list and contents."""

    source: list[str]
    files: Count
    listing: str
    documents: Count
    characters: Count
    content: str
    undecodable: Count


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of ``manifest.json``.

    Attributes:
        form: Kind of contents.
        settings: Settings that determine the contents; a store is reused only for the same
            settings.
        python: Version of the Python that made the store.
        corpus: Record of the text.
        tokenizer_fingerprint: Hash of the tokenizer's pieces.
        vocabulary_size: Number of ids.
        splits: ``train`` and ``validation``.
        files: Every file of the store except the manifest, by its path in the folder.
    """

    form: Form
    settings: Mapping[str, Any]
    python: str
    corpus: CorpusRecord
    tokenizer_fingerprint: str
    vocabulary_size: Count
    splits: Mapping[str, SplitRecord]
    files: Mapping[str, FileRecord]

    def fingerprint(self, split: SplitName) -> str:
        """Return a hash that is equal exactly if the files of the split are equal."""
        parts = [
            f"{name} {record.sha256}"
            for name, record in sorted(self.files.items())
            if name.startswith(f"{split}/")
        ]
        return sha256("\n".join(parts).encode())

    def paths(self, folder: str | Path) -> list[tuple[str, Path, FileRecord]]:
        """Return name, path in ``folder`` and record of every file.

        Raises:
            StoreError: A name leads to another folder.
        """
        try:
            return [(name, inside(folder, name), record) for name, record in self.files.items()]
        except (ValueError, OSError) as error:
            raise StoreError(
                f"{Path(folder, MANIFEST_FILE)}: {error}. Copy the folder again from its source"
            ) from error

    def tokens(
        self, folder: str | Path, split: SplitName, *, form: Form = "text", block_size: int = 1
    ) -> ChunkMap:
        """Return the tokens of a split of ``folder``.

        Raises:
            StoreError: The folder has another form, or the index or a chunk is missing or damaged.
        """
        if self.form != form:
            raise StoreError(
                f"{folder} has data of the form {self.form!r}, but {form!r} is needed. Read it "
                f"with {_READ_BY[self.form]}, or use another folder"
            )
        record = self.splits[split]
        path = Path(folder, split)
        chunks = read_chunks(path, record.dtype) if record.tokens else ()
        tokens = sum(chunk.tokens for chunk in chunks)
        if tokens != record.tokens:
            raise StoreError(
                f"{path} has {tokens} tokens, but {record.tokens} were written. {_REMEDY}"
            )
        return ChunkMap(
            chunks,
            vocabulary_size=self.vocabulary_size,
            block_size=block_size,
            marks=0 if form == "text" else MARKS,
        )

    def write(self, folder: str | Path) -> None:
        """Write ``manifest.json`` into ``folder``, with a digest of itself."""
        values = {"format": FORMAT, **asdict(self)}
        text = json.dumps({**values, "sha256": _digest(values)}, indent=1, sort_keys=True)
        Path(folder, MANIFEST_FILE).write_text(f"{text}\n", "utf-8")

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """Read ``manifest.json`` from ``folder``.

        Raises:
            StoreError: It is missing, damaged, of another format, or has impossible values.
        """
        path = Path(folder, MANIFEST_FILE)
        if not os.path.lexists(path):
            raise StoreError(
                f"{path} is missing, so {folder} is not a folder of prepared data. Run `ptdp "
                "prepare`"
            )
        with reading(path, StoreError, _REMEDY):
            values = read_json(inside(folder, MANIFEST_FILE))
            if not isinstance(values, dict):
                raise ValueError("not a JSON object")
        version = values.get("format")
        if version != FORMAT or isinstance(version, bool):
            raise StoreError(
                f"{path} has format {version!r}, but this version reads format {FORMAT}. "
                "Prepare the data again (ptdp prepare --data.overwrite true)"
            )
        if values.pop("sha256", None) != _digest(values):
            raise StoreError(
                f"{path} is damaged, or was edited: its sha256 differs from the one that it "
                f"contains. {_REMEDY}"
            )
        with reading(path, StoreError, _REMEDY):
            del values["format"]
            return cls._of(values)

    @classmethod
    def _of(cls, values: dict[str, Any]) -> Manifest:
        """Create a manifest from parsed values and check their types."""
        manifest = cls(
            **{
                **values,
                "corpus": CorpusRecord(**values["corpus"]),
                "splits": {name: SplitRecord(**value) for name, value in values["splits"].items()},
                "files": {name: FileRecord(**value) for name, value in values["files"].items()},
            }
        )
        for record in (
            manifest,
            manifest.corpus,
            *manifest.splits.values(),
            *manifest.files.values(),
        ):
            check_types(record)
        wrong = {
            name
            for name, record in manifest.files.items()
            if not _SHA256.fullmatch(record.sha256) or name == MANIFEST_FILE
        }
        if wrong:
            raise ValueError(f"it has no sha256 of {min(wrong)!r}")
        if set(manifest.splits) != set(SPLITS):
            raise ValueError(f"its splits are not {' and '.join(SPLITS)}")
        return manifest


def record_files(folder: str | Path) -> dict[str, FileRecord]:
    """Return size and hash of every file below ``folder`` except a manifest."""
    root = Path(folder)
    paths = sorted(
        path for path in root.rglob("*") if path.is_file() and path.name != MANIFEST_FILE
    )
    return {
        path.relative_to(root).as_posix(): FileRecord(
            size=path.stat().st_size, sha256=_sha256(path)
        )
        for path in paths
    }


def verify_store(
    folder: str | Path, *, hashes: bool = True, vocabulary_size: int | None = None
) -> Manifest:
    """Check a prepared folder against its manifest.

    Every file must exist with its recorded size, and the tokenizer must be the one whose ids are
    stored. With ``hashes``, every file must also have its recorded hash, and every token must be an
    id of the vocabulary.

    litdata itself waits two minutes for a missing chunk and does not notice a flipped byte. This
    check therefore runs before litdata opens the folder.

    Raises:
        StoreError: The message names the first wrong file, or the number of ids if it is not
            ``vocabulary_size``.
        TokenizerError: The tokenizer is damaged.
    """
    manifest = Manifest.read(folder)
    for _, path, record in manifest.paths(folder):
        check_file(path, record, hashes=hashes)
    needed = set()
    for split in SPLITS:
        tokens = manifest.tokens(folder, split, form=manifest.form)
        if hashes:
            tokens.check()
        if tokens.chunks:
            needed |= {f"{split}/{chunk.path.name}" for chunk in tokens.chunks}
            needed.add(f"{split}/{INDEX_FILE}")
    if not any(name.startswith(f"{TOKENIZER_FOLDER}/") for name in manifest.files):
        needed |= {MODEL_FILE, RECORD_FILE}
    missing = needed - set(manifest.files)
    if missing:
        raise StoreError(
            f"{Path(folder, min(missing))} is not listed in {MANIFEST_FILE}. {_REMEDY}"
        )
    tokenizer = load_tokenizer(folder)
    # Do not ask a Hugging Face tokenizer for its number of ids in every process: that takes
    # seconds, and the number follows from its files.
    size_matches = (
        not isinstance(tokenizer, Tokenizer)
        or tokenizer.vocabulary_size == manifest.vocabulary_size
    )
    if tokenizer.fingerprint != manifest.tokenizer_fingerprint or not size_matches:
        raise StoreError(
            f"{folder} has tokens of tokenizer {manifest.tokenizer_fingerprint[:12]}, but its "
            f"tokenizer is {tokenizer.fingerprint[:12]}, so the tokenizer was replaced"
        )
    if vocabulary_size not in (None, manifest.vocabulary_size):
        raise StoreError(
            f"data_dir={folder} has a vocabulary of {manifest.vocabulary_size}, but "
            f"vocabulary_size={vocabulary_size}. Use that of the folder, another folder, or "
            "overwrite (--data.overwrite true)"
        )
    return manifest


def check_file(
    path: Path, record: FileRecord, *, hashes: bool = True, name: str | None = None
) -> None:
    """Compare a file with its record.

    Args:
        path: Path of the file.
        record: Expected size and hash.
        hashes: Compare the hash too.
        name: Name of the file in messages; its path by default.

    Raises:
        StoreError: The file is missing, has another size, or is damaged.
    """
    name = name or str(path)
    if not os.path.lexists(path):
        raise StoreError(f"{name} is missing. {_REMEDY}")
    with reading(name, StoreError, _REMEDY):
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise StoreError(f"{name} is not a file. {_REMEDY}")
        if info.st_size != record.size:
            raise StoreError(
                f"{name} has {info.st_size} bytes, but {record.size} were written. {_REMEDY}"
            )
        if hashes and _sha256(path) != record.sha256:
            raise StoreError(f"{name} is damaged: its sha256 differs from the manifest. {_REMEDY}")


def _digest(values: Mapping[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode())


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
