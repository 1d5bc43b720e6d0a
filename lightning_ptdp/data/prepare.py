"""Text to a folder that training can read: tokenizer, token chunks of two splits, and a manifest.

::

    <output>/
      manifest.json          what is here, made from what, and the hash of every file
      tokenizer.model        (and tokenizer.json, its record)
      train/                 litdata chunks: documents joined, each followed by the end token
      validation/

The folder appears complete or not at all.
"""

from __future__ import annotations

import logging
import os
import platform
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from lightning_ptdp.data.config import PrepareConfig
from lightning_ptdp.data.corpus import Corpus, ReadReport, listing_digest
from lightning_ptdp.data.errors import CorpusError, DataError, StoreError, TokenizerError
from lightning_ptdp.data.manifest import MANIFEST_FILE, CorpusRecord, Manifest, SplitRecord, record_files, verify_store
from lightning_ptdp.data.split import Split, Survey, survey
from lightning_ptdp.data.store import ChunkWriter, token_dtype
from lightning_ptdp.data.tokenizer import Tokenizer

__all__ = ["PreparedData", "check_prepare", "prepare"]

Progress = Callable[[str], None]

_log = logging.getLogger(__name__)
_BATCH_CHARACTERS = 4_000_000


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """A prepared folder.

    Attributes:
        folder: Where it is.
        manifest: What is in it.
        reused: True if it was there already.
        seconds: How long the call took.
    """

    folder: Path
    manifest: Manifest
    reused: bool
    seconds: float

    def summary(self) -> str:
        """One line for people."""
        splits = ", ".join(f"{record.tokens:,} {name} tokens" for name, record in self.manifest.splits.items())
        did = "found" if self.reused else f"prepared in {self.seconds:.1f} s:"
        corpus = self.manifest.corpus
        return (
            f"{self.folder}: {did} {splits} of {corpus.documents:,} documents ({corpus.characters / 1e6:.1f} M characters), "
            f"vocabulary {self.manifest.vocabulary_size}"
        )


def check_prepare(config: PrepareConfig, *, hashes: bool = True) -> Manifest | None:
    """Everything that can be wrong with a preparation and is known before it starts; writes nothing.

    Returns the manifest if the folder is there already, made with the same settings and intact; else None. Without ``hashes``
    intact means of the right sizes.

    Raises:
        CorpusError: The source is missing, unreadable or empty.
        StoreError: The output is something else, was made with other settings or is damaged, or cannot be written.
    """
    output = Path(config.output)
    if output.exists() and not output.is_dir():
        raise StoreError(f"output={output} is a file: name a folder")
    if (output / MANIFEST_FILE).exists():
        try:
            return _existing(config, output, hashes)
        except DataError:
            if not config.overwrite:
                raise
    elif output.exists() and any(output.iterdir()):
        raise StoreError(f"output={output} holds other files and no {MANIFEST_FILE}: name a new or empty folder")
    config.corpus.files()
    _given_tokenizer(config)
    parent = next(parent for parent in output.absolute().parents if parent.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StoreError(f"output={output} cannot be written: no permission in {parent}")
    return None


def prepare(config: PrepareConfig, *, progress: Progress | None = None, hashes: bool = True) -> PreparedData:
    """Make the folder, or find it made already with the same settings.

    Args:
        config: What and where.
        progress: Called with one line of text a stage; by default the lines go to this module's logger.
        hashes: Compare the hashes of a folder that is there already, not only the sizes.

    Raises:
        CorpusError, TokenizerError, StoreError: See ``check_prepare``; also a vocabulary that the text does not support.
    """
    began = time.monotonic()
    say = progress or _log.info
    manifest = check_prepare(config, hashes=hashes)
    reused = manifest is not None
    output = Path(config.output)
    if manifest is None:
        output.parent.mkdir(parents=True, exist_ok=True)
        # Hidden, so that a source folder that contains the output does not read it.
        folder = output.with_name(f".{output.name}.{uuid.uuid4().hex[:12]}")
        folder.mkdir()
        try:
            manifest = _build(config, folder, say)
            manifest = _publish(config, folder, output, manifest)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    done = PreparedData(folder=output, manifest=manifest, reused=reused, seconds=time.monotonic() - began)
    say(done.summary())
    return done


def _existing(config: PrepareConfig, output: Path, hashes: bool) -> Manifest:
    manifest = Manifest.read(output)
    there, here = manifest.settings, config.settings
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
    # The folder stands for itself: a source that is gone, or another Python's library, does not matter any more.
    if config.source is not None and all(Path(root).exists() for root in config.corpus.roots):
        files = config.corpus.files()
        if listing_digest(files) != manifest.corpus.listing:
            raise StoreError(
                f"output={output} was prepared from {manifest.corpus.files} files that have changed since (now {len(files)}): "
                "use another folder, or overwrite (--overwrite)"
            )
    tokenizer = _given_tokenizer(config) if config.tokenizer_dir is not None and Path(config.tokenizer_dir).exists() else None
    if tokenizer is not None and tokenizer.fingerprint != manifest.tokenizer_fingerprint:
        raise StoreError(
            f"output={output} was prepared with tokenizer {manifest.tokenizer_fingerprint[:12]}, but tokenizer_dir={config.tokenizer_dir} "
            f"now has {tokenizer.fingerprint[:12]}: use another folder, or overwrite (--overwrite)"
        )
    return verify_store(output, hashes=hashes)


def _given_tokenizer(config: PrepareConfig) -> Tokenizer | None:
    """That of ``tokenizer_dir``, if it is one that the settings ask for."""
    if config.tokenizer_dir is None:
        return None
    tokenizer = Tokenizer.load(config.tokenizer_dir)
    if tokenizer.vocabulary_size != config.vocabulary_size:
        raise TokenizerError(
            f"tokenizer_dir={config.tokenizer_dir} has a vocabulary of {tokenizer.vocabulary_size}, not vocabulary_size="
            f"{config.vocabulary_size}: use that number"
        )
    for symbol in config.control_symbols:
        tokenizer.control_id(symbol)
    return tokenizer


def _build(config: PrepareConfig, folder: Path, say: Progress) -> Manifest:
    corpus, report = config.corpus, ReadReport()
    files = corpus.files()
    say(f"reading {len(files):,} files, {sum(file.size for file in files) / 1e6:.1f} MB")
    found = survey(corpus.documents(report), validation_fraction=config.validation_fraction, seed=config.seed)
    if report.undecodable:
        say(report.summary())
    tokenizer = _given_tokenizer(config)
    if tokenizer is None:
        say(f"learning {config.vocabulary_size} pieces from {found.documents:,} documents")
        tokenizer = Tokenizer.train(
            _sample(config, found), vocabulary_size=config.vocabulary_size, control_symbols=config.control_symbols
        )
    tokenizer.save(folder)
    splits = _write_splits(config, folder, found, tokenizer, say)
    manifest = Manifest(
        settings=config.settings,
        python=platform.python_version(),
        corpus=CorpusRecord(
            source=list(corpus.roots) or ["standard library"],
            files=len(files),
            listing=listing_digest(files),
            documents=found.documents,
            characters=found.characters,
            content=found.digest,
            undecodable=len(report.undecodable),
        ),
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocabulary_size=tokenizer.vocabulary_size,
        splits=splits,
        files=record_files(folder),
    )
    manifest.write(folder)
    return manifest


def _sample(config: PrepareConfig, found: Survey) -> Iterator[str]:
    """The training text for the tokenizer: all, or as many lines as allowed, drawn evenly over the corpus."""
    texts = (found.split.parts(document)[0] for document in config.corpus.documents())
    keep = config.tokenizer_characters / found.characters
    if keep >= 1:
        yield from texts
        return
    # Python promises that random() of a seed stays the same in every version.
    draw = random.Random(config.seed)
    left = config.tokenizer_characters
    for line in chain.from_iterable(text.split("\n") for text in texts):
        if left > 0 and draw.random() < keep:
            yield line[:left]
            left -= len(line)


def _write_splits(
    config: PrepareConfig, folder: Path, found: Survey, tokenizer: Tokenizer, say: Progress
) -> dict[str, SplitRecord]:
    dtype = token_dtype(tokenizer.vocabulary_size)
    names = ("train", "validation")
    writers = [ChunkWriter(folder / name, chunk_tokens=config.chunk_tokens, dtype=dtype) for name in names]
    documents = [0, 0]
    seen = 0
    for batch, count in _batches(config.corpus, found.split):
        for index, texts in enumerate(batch):
            for ids in tokenizer.encode_many(texts, num_threads=os.cpu_count() or 1):
                writers[index].add([*ids, tokenizer.eos_id])
            documents[index] += len(texts)
        seen += count
        say(f"tokenized {seen:,} of {found.documents:,} documents: {sum(writer.tokens for writer in writers):,} tokens")
    if seen != found.documents:
        raise CorpusError(f"source={config.source!r} changed while it was read: {found.documents} documents, then {seen}")
    for writer in writers:
        writer.close()
    return {
        name: SplitRecord(documents=count, tokens=writer.tokens, dtype=dtype.name)
        for name, count, writer in zip(names, documents, writers, strict=True)
    }


def _batches(corpus: Corpus, split: Split) -> Iterator[tuple[tuple[list[str], list[str]], int]]:
    """(training texts, validation texts) and the number of documents behind them, a few megabytes at a time."""
    batch: tuple[list[str], list[str]] = ([], [])
    characters = count = 0
    for document in corpus.documents():
        for texts, part in zip(batch, split.parts(document), strict=True):
            if part:
                texts.append(part)
        characters += len(document.text)
        count += 1
        if characters >= _BATCH_CHARACTERS:
            yield batch, count
            batch, characters, count = ([], []), 0, 0
    if count:
        yield batch, count


def _publish(config: PrepareConfig, folder: Path, output: Path, manifest: Manifest) -> Manifest:
    """Put the finished folder in its place; where another process was faster, use what it made."""
    replaced = output.with_name(f"{folder.name}.replaced")
    if config.overwrite and output.exists():
        output.rename(replaced)
    try:
        folder.rename(output)
    except OSError:
        other = check_prepare(config) if output.exists() else None
        if other is None:
            if replaced.exists() and not output.exists():
                replaced.rename(output)
            raise
        manifest = other
    shutil.rmtree(replaced, ignore_errors=True)
    return manifest
