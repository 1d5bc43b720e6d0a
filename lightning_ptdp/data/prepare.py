"""Preparation of data: tokenizer, token chunks of two splits, and a manifest.

::

    <output>/
      manifest.json          what is here, made from what, and the hash of every file
      tokenizer.model        (and tokenizer.json, its record; or the folder tokenizer/)
      train/                 litdata chunks: documents or conversations, joined
      validation/

All kinds of data are stored in this form. A subclass of ``Preparation`` makes the tokens.

The folder appears complete or not at all. Until then, the data are in a hidden folder next to it
(``preparation_work.py``). If a call is killed, the next call reuses the finished parts.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from lightning_ptdp.base.option_types import Size, check_fraction, check_types
from lightning_ptdp.checkpoint.files import replace, sha256
from lightning_ptdp.data.data_error import DataError, StoreError
from lightning_ptdp.data.file_pieces import CorpusFile, listing_digest
from lightning_ptdp.data.huggingface_tokenizer import AnyTokenizer
from lightning_ptdp.data.manifest import (
    FORMAT,
    MANIFEST_FILE,
    CorpusRecord,
    Form,
    Manifest,
    SplitRecord,
    record_files,
    verify_store,
)
from lightning_ptdp.data.preparation_work import Reporter, work_folder

Progress = Callable[[str], None]
BuiltStore: TypeAlias = tuple[AnyTokenizer, dict[str, SplitRecord], dict[str, Any]]
"""Tokenizer, record of each split, and the fields of ``CorpusRecord`` that depend on the content."""

_log = logging.getLogger(__name__)
_NOT_SETTINGS = ("output", "overwrite", "num_workers", "part_bytes")


@dataclass(frozen=True, kw_only=True)
class Preparation(ABC):
    """Source, destination and options of a preparation; subclasses make the tokens.

    Args:
        output: Folder to create.
        tokenizer_dir: Folder whose tokenizer is used.
        validation_fraction: Fraction of the data used for validation, more than 0 and at most 0.5.
        overwrite: Replace a folder that was prepared with other settings or is damaged.
        num_workers: Number of processes that read and tokenize. The result does not depend on it.

    Raises:
        ValueError: A number is out of range; the message names it.
    """

    output: str | Path
    tokenizer_dir: str | Path | None = None
    validation_fraction: float = 0.03
    overwrite: bool = False
    num_workers: Size = 1

    form: ClassVar[Form]
    """Kind of contents."""

    def __post_init__(self) -> None:
        check_types(self)
        check_fraction("validation_fraction", self.validation_fraction)
        if "://" in str(self.output):
            raise ValueError(
                f"output={str(self.output)!r} is a URL. Give a local folder, and copy it to "
                "the store afterwards. To train on data in a store, set remote to its URL and "
                "data_dir to a local folder for the copy"
            )

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Settings that determine the contents of the folder, in the form of the manifest."""

    @property
    @abstractmethod
    def roots(self) -> tuple[str, ...]:
        """The given paths of the source; empty for the standard library."""

    @abstractmethod
    def files(self) -> list[CorpusFile]:
        """Return the files of the source, after a check that each can be read.

        Raises:
            CorpusError: A file is missing or cannot be read.
        """

    @abstractmethod
    def given_tokenizer(self) -> AnyTokenizer | None:
        """Return the tokenizer in ``tokenizer_dir``, if the settings name one.

        Raises:
            TokenizerError: It cannot be used.
        """

    def check_source(self) -> None:
        """Check everything that does not require reading all of the source; write nothing.

        Raises:
            DataError: The source or the tokenizer cannot be used.
        """
        self.files()
        self.given_tokenizer()

    @abstractmethod
    def build(self, work: Path, folder: Path, report: Reporter) -> BuiltStore:
        """Write the tokens of both splits into ``folder``."""

    def _settings(self, **changed: object) -> dict[str, Any]:
        """Return the options, with changes, as they compare equal to those of a manifest."""
        names = [field.name for field in fields(self) if field.name not in _NOT_SETTINGS]
        values = {**{name: getattr(self, name) for name in names}, **changed}
        return dict(json.loads(json.dumps(values, default=str)))


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """A prepared folder.

    Attributes:
        folder: Path of the folder.
        manifest: Record of its contents.
        reused: True if the folder already existed.
        seconds: Duration of the call.
    """

    folder: Path
    manifest: Manifest
    reused: bool
    seconds: float

    def summary(self) -> str:
        """Return one line of text that summarizes the result."""
        splits = ", ".join(
            f"{record.tokens:,} {name} tokens" for name, record in self.manifest.splits.items()
        )
        action = "found" if self.reused else f"prepared in {self.seconds:.1f} s:"
        corpus = self.manifest.corpus
        return (
            f"{self.folder}: {action} {splits} of {corpus.documents:,} documents "
            f"({corpus.characters / 1e6:.1f} M characters), "
            f"vocabulary {self.manifest.vocabulary_size}"
        )


def check_prepare(config: Preparation, *, hashes: bool = True) -> Manifest | None:
    """Check everything that can be wrong before a preparation starts; write nothing.

    Returns:
        The manifest if the folder already exists, was made with the same settings and is intact;
        otherwise None. Without ``hashes``, files of the right sizes count as intact.

    Raises:
        CorpusError: The source is missing, unreadable or empty.
        StoreError: The output is no prepared folder, was made with other settings, is damaged, or
            cannot be written.
        TokenizerError: ``tokenizer_dir`` cannot be used.
    """
    output = Path(config.output)
    if output.exists() and not output.is_dir():
        raise StoreError(f"output={output} is a file. Give a folder")
    if (output / MANIFEST_FILE).exists():
        try:
            return _existing(config, output, hashes)
        except DataError:
            if not config.overwrite:
                raise
    elif output.exists() and any(output.iterdir()):
        raise StoreError(
            f"output={output} has other files but no {MANIFEST_FILE}. Give a new or empty folder"
        )
    parent = next(parent for parent in output.absolute().parents if parent.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StoreError(f"output={output} cannot be written: no permission in {parent}")
    config.check_source()
    return None


def prepare(
    config: Preparation, *, progress: Progress | None = None, hashes: bool = True
) -> PreparedData:
    """Prepare the folder, continue an interrupted preparation, or reuse the folder.

    A folder is reused if it was made with the same settings.

    Args:
        config: Configuration of the preparation.
        progress: Function called with lines of text, a few per stage. Default: the lines go to the
            logger of this module, and a terminal shows bars.
        hashes: Compare the hashes of an existing folder, not only the sizes.

    Raises:
        CorpusError, TokenizerError, StoreError: See ``check_prepare``; also a vocabulary that the
            text does not support.
    """
    start = time.monotonic()
    say = progress or _log.info
    manifest = check_prepare(config, hashes=hashes)
    reused = manifest is not None
    output = Path(config.output)
    if manifest is None:
        report = Reporter(say=say, bars=progress is None)
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            # The folder is hidden, so that a source folder that contains the output does not read
            # it.
            with work_folder(output, _key(config)) as work:
                folder, manifest = _build(config, work, report)
                manifest = _publish(config, folder, manifest)
        except OSError as error:
            raise StoreError(
                f"output={output} cannot be written: {error}. Finished parts are kept for the "
                "next call"
            ) from error
    result = PreparedData(
        folder=output, manifest=manifest, reused=reused, seconds=time.monotonic() - start
    )
    say(result.summary())
    return result


def _existing(config: Preparation, output: Path, hashes: bool) -> Manifest:
    """Return the manifest of a folder, whose settings and sources must be the current ones."""
    manifest = Manifest.read(output)
    stored, current = ({"form": item.form, **item.settings} for item in (manifest, config))
    differences = [
        f"{name} was {stored.get(name)!r} and is now {current.get(name)!r}"
        for name in {**current, **stored}
        if stored.get(name) != current.get(name)
    ]
    if differences:
        raise StoreError(
            f"output={output} was prepared with other settings ({'; '.join(differences)}). Use "
            "those settings, another folder, or overwrite (--data.overwrite true)"
        )
    # A prepared folder does not depend on its source: the source may be gone, or the library may be
    # that of another Python.
    if config.roots and all(Path(root).exists() for root in config.roots):
        files = config.files()
        if listing_digest(files) != manifest.corpus.listing:
            raise StoreError(
                f"output={output} was prepared from {manifest.corpus.files} files that have "
                f"changed since (now {len(files)}). Use another folder, or overwrite (--data.overwrite true)"
            )
    tokenizer = (
        config.given_tokenizer()
        if config.tokenizer_dir is not None and Path(config.tokenizer_dir).exists()
        else None
    )
    if tokenizer is not None and tokenizer.fingerprint != manifest.tokenizer_fingerprint:
        raise StoreError(
            f"output={output} was prepared with tokenizer {manifest.tokenizer_fingerprint[:12]}, "
            f"but tokenizer_dir={config.tokenizer_dir} now has {tokenizer.fingerprint[:12]}. Use "
            "another folder, or overwrite (--data.overwrite true)"
        )
    return verify_store(output, hashes=hashes)


def _build(config: Preparation, work: Path, report: Reporter) -> tuple[Path, Manifest]:
    """Build the folder inside the work folder."""
    files = config.files()
    report.say(f"reading {len(files):,} files, {sum(file.size for file in files) / 1e6:.1f} MB")
    folder = work / "store"
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer, splits, counts = config.build(work, folder, report)
    tokenizer.save(folder)
    manifest = Manifest(
        form=config.form,
        settings=config.settings,
        python=platform.python_version(),
        corpus=CorpusRecord(
            source=list(config.roots) or ["standard library"],
            files=len(files),
            listing=listing_digest(files),
            **counts,
        ),
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocabulary_size=tokenizer.vocabulary_size,
        splits=splits,
        files=record_files(folder),
    )
    manifest.write(folder)
    return folder, manifest


def _key(config: Preparation) -> dict[str, Any]:
    """Return the settings on which finished parts of a preparation depend."""
    files = config.files()
    tokenizer = config.given_tokenizer()
    times = "\n".join(str(file.path.stat().st_mtime_ns) for file in files)
    return {
        "format": FORMAT,
        "settings": config.settings,
        "part_bytes": getattr(config, "part_bytes", None),
        "listing": listing_digest(files),
        "times": sha256(times.encode()),
        "tokenizer": None if tokenizer is None else tokenizer.fingerprint,
    }


def _publish(config: Preparation, folder: Path, manifest: Manifest) -> Manifest:
    """Move the finished folder to its destination.

    If another process was faster, use its folder, provided that it has the same settings.
    """
    output = Path(config.output)
    try:
        if config.overwrite:
            replace(folder, output)
        else:
            folder.rename(output)
    except OSError:
        existing = check_prepare(config) if output.exists() else None
        if existing is None:
            raise
        return existing
    return manifest
