"""Preparation of text: tokenizer, token chunks of two splits, and a manifest.

::

    <output>/
      manifest.json          what is here, made from what, and the hash of every file
      tokenizer.model        (and tokenizer.json, its record)
      train/                 litdata chunks: documents joined, each followed by the end token
      validation/

The folder appears complete or not at all. Until then, the data are in a hidden folder beside it
(``work_folder.py``). If a call is killed, the next call reuses the finished parts.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ptdp.data.corpus import listing_digest
from lightning_ptdp.data.corpus_build import Builder
from lightning_ptdp.data.data_config import PrepareConfig
from lightning_ptdp.data.data_error import DataError, StoreError, TokenizerError
from lightning_ptdp.data.huggingface_tokenizer import AnyTokenizer, load_tokenizer
from lightning_ptdp.data.manifest import (
    FORMAT,
    MANIFEST_FILE,
    CorpusRecord,
    Manifest,
    record_files,
    verify_store,
)
from lightning_ptdp.data.preparation_progress import Reporter
from lightning_ptdp.data.work_folder import work_folder

__all__ = ["PreparedData", "check_place", "check_prepare", "check_settings", "prepare", "publish"]

Progress = Callable[[str], None]

_log = logging.getLogger(__name__)


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
        did = "found" if self.reused else f"prepared in {self.seconds:.1f} s:"
        corpus = self.manifest.corpus
        return (
            f"{self.folder}: {did} {splits} of {corpus.documents:,} documents "
            f"({corpus.characters / 1e6:.1f} M characters), "
            f"vocabulary {self.manifest.vocabulary_size}"
        )


def check_prepare(config: PrepareConfig, *, hashes: bool = True) -> Manifest | None:
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
    manifest = check_place(
        output, overwrite=config.overwrite, check=lambda: _existing(config, output, hashes)
    )
    if manifest is None:
        config.files()
        _given_tokenizer(config)
    return manifest


def prepare(
    config: PrepareConfig, *, progress: Progress | None = None, hashes: bool = True
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
    began = time.monotonic()
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
                manifest = publish(
                    folder,
                    output,
                    manifest,
                    overwrite=config.overwrite,
                    check=lambda: check_prepare(config),
                )
        except OSError as error:
            raise StoreError(
                f"output={output} cannot be written: {error}. What was finished is kept for the "
                "next call"
            ) from error
    done = PreparedData(
        folder=output, manifest=manifest, reused=reused, seconds=time.monotonic() - began
    )
    say(done.summary())
    return done


def _existing(config: PrepareConfig, output: Path, hashes: bool) -> Manifest:
    manifest = Manifest.read(output)
    check_settings(manifest, config.settings, output)
    # A prepared folder does not depend on its source: the source may be gone, or the library may be
    # that of another Python.
    if config.source is not None and all(Path(root).exists() for root in config.roots):
        files = config.files()
        if listing_digest(files) != manifest.corpus.listing:
            raise StoreError(
                f"output={output} was prepared from {manifest.corpus.files} files that have "
                f"changed since (now {len(files)}): "
                "use another folder, or overwrite (--overwrite)"
            )
    tokenizer = (
        _given_tokenizer(config)
        if config.tokenizer_dir is not None and Path(config.tokenizer_dir).exists()
        else None
    )
    if tokenizer is not None and tokenizer.fingerprint != manifest.tokenizer_fingerprint:
        raise StoreError(
            f"output={output} was prepared with tokenizer {manifest.tokenizer_fingerprint[:12]}, "
            f"but tokenizer_dir={config.tokenizer_dir} "
            f"now has {tokenizer.fingerprint[:12]}: use another folder, or overwrite (--overwrite)"
        )
    return verify_store(output, hashes=hashes)


def check_settings(manifest: Manifest, here: Mapping[str, Any], output: Path) -> None:
    """Refuse a folder that was made with other settings.

    Raises:
        StoreError: Settings differ; the message names all of them.
    """
    there = manifest.settings
    differences = [
        f"{name} is {there.get(name)!r} there and {here.get(name)!r} here"
        for name in {**here, **there}
        if there.get(name) != here.get(name)
    ]
    if differences:
        raise StoreError(
            f"output={output} was prepared with other settings ({'; '.join(differences)}): "
            "use those, another folder, or overwrite (--overwrite)"
        )


def check_place(output: Path, *, overwrite: bool, check: Callable[[], Manifest]) -> Manifest | None:
    """Return the manifest that ``check`` finds in the output folder.

    Return None if the folder can be made, or made again.

    Raises:
        StoreError: The output is no prepared folder, or cannot be written.
        DataError: ``check`` raised it, and ``overwrite`` is off.
    """
    if output.exists() and not output.is_dir():
        raise StoreError(f"output={output} is a file: name a folder")
    if (output / MANIFEST_FILE).exists():
        try:
            return check()
        except DataError:
            if not overwrite:
                raise
    elif output.exists() and any(output.iterdir()):
        raise StoreError(
            f"output={output} holds other files and no {MANIFEST_FILE}: name a new or empty folder"
        )
    parent = next(parent for parent in output.absolute().parents if parent.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StoreError(f"output={output} cannot be written: no permission in {parent}")
    return None


def _given_tokenizer(config: PrepareConfig) -> AnyTokenizer | None:
    """Return the tokenizer in ``tokenizer_dir``, if the settings name one."""
    if config.tokenizer_dir is None:
        return None
    tokenizer = load_tokenizer(config.tokenizer_dir)
    if config.vocabulary_size not in (None, tokenizer.vocabulary_size):
        raise TokenizerError(
            f"tokenizer_dir={config.tokenizer_dir} has a vocabulary of "
            f"{tokenizer.vocabulary_size}, not vocabulary_size="
            f"{config.vocabulary_size}: use that number"
        )
    _ = tokenizer.eos_id  # a Hugging Face tokenizer may have none
    for symbol in config.control_symbols:
        tokenizer.control_id(symbol)
    return tokenizer


def _build(config: PrepareConfig, work: Path, report: Reporter) -> tuple[Path, Manifest]:
    """Build the folder inside the work folder."""
    files = config.files()
    report.say(f"reading {len(files):,} files, {sum(file.size for file in files) / 1e6:.1f} MB")
    builder = Builder(config=config, work=work, report=report)
    found, undecodable = builder.survey()
    tokenizer: AnyTokenizer = _given_tokenizer(config) or builder.tokenizer(found)
    folder = work / "store"
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer.save(folder)
    splits = builder.tokens(found, tokenizer, folder)
    manifest = Manifest(
        settings=config.settings,
        python=platform.python_version(),
        corpus=CorpusRecord(
            source=list(config.roots) or ["standard library"],
            files=len(files),
            listing=listing_digest(files),
            documents=found.documents,
            characters=found.characters,
            content=found.digest,
            undecodable=undecodable,
        ),
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocabulary_size=tokenizer.vocabulary_size,
        splits=splits,
        files=record_files(folder),
    )
    manifest.write(folder)
    return folder, manifest


def _key(config: PrepareConfig) -> dict[str, Any]:
    """Return the settings on which finished parts of a preparation depend."""
    files, tokenizer = config.files(), _given_tokenizer(config)
    times = "\n".join(str(file.path.stat().st_mtime_ns) for file in files)
    return {
        "format": FORMAT,
        "settings": config.settings,
        "part_bytes": config.part_bytes,
        "listing": listing_digest(files),
        "times": hashlib.sha256(times.encode()).hexdigest(),
        "tokenizer": None if tokenizer is None else tokenizer.fingerprint,
    }


def publish(
    folder: Path,
    output: Path,
    manifest: Manifest,
    *,
    overwrite: bool,
    check: Callable[[], Manifest | None],
) -> Manifest:
    """Move the finished folder to its destination.

    If another process was faster, use its folder, provided that ``check`` accepts it.
    """
    replaced = output.with_name(f".{output.name}.{uuid.uuid4().hex[:12]}.replaced")
    if overwrite and output.exists():
        output.rename(replaced)
    try:
        folder.rename(output)
    except OSError:
        other = check() if output.exists() else None
        if other is None:
            if replaced.exists() and not output.exists():
                replaced.rename(output)
            raise
        manifest = other
    shutil.rmtree(replaced, ignore_errors=True)
    return manifest
