"""Preparation of text: settings, and the stages survey, tokenizer, tokens of each part, and chunks.

A part is some megabytes of consecutive text. Any number of processes read parts. Their results are
combined in the order of the parts, so the result does not depend on the assignment of parts to
processes. Memory holds only a few parts and 40 bytes per document. The work folder keeps finished
stages and finished parts of the tokens for an interrupted preparation.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lightning_ptdp.base.option_types import Count, Size, check_integer
from lightning_ptdp.data.corpus import Corpus, Document, ReadReport
from lightning_ptdp.data.data_error import CorpusError, TokenizerError
from lightning_ptdp.data.file_pieces import FilePiece, grouped
from lightning_ptdp.data.huggingface_tokenizer import AnyTokenizer, load_tokenizer
from lightning_ptdp.data.manifest import SPLITS, SplitRecord
from lightning_ptdp.data.preparation_work import (
    Reporter,
    call_in_process,
    ordered_map,
    read_record,
    write_record,
)
from lightning_ptdp.data.prepare import BuiltStore, Preparation
from lightning_ptdp.data.split import Scan, Split, Survey, scan, survey
from lightning_ptdp.data.token_store import CHUNK_TOKENS, TokenType, token_dtype, write_chunks
from lightning_ptdp.data.tokenizer import Tokenizer

Part = tuple[FilePiece, ...]
Result = TypeVar("Result")
_BATCH_CHARACTERS = 4_000_000


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(Corpus, Preparation):
    """Source, destination and options of a preparation of text.

    Args:
        output: Folder to create.
        vocabulary_size: Number of ids of the tokenizer, special ones included. None: that of
            ``tokenizer_dir``.
        validation_fraction: Fraction of the characters used for validation, more than 0 and at most
            0.5.
        seed: Seed of the division into splits and of the sample from which the tokenizer learns.
        chunk_tokens: Tokens of a chunk file. A training sample never spans two chunks.
        control_symbols: Pieces such as ``[MASK]`` that no text produces. They count towards
            ``vocabulary_size``.
        tokenizer_dir: Folder whose tokenizer is used: another prepared folder, so that the two can
            be mixed, or a Hugging Face folder with a tokenizer, such as a model's. Default: learn
            one from the text.
        tokenizer_characters: Maximum amount of training text from which the tokenizer learns (lines
            drawn at random).
        overwrite: Replace a folder that was prepared with other settings or is damaged.
        num_workers: Number of processes that read and tokenize. With 1, this process does both, and
            its tokenizer uses as many threads as there are processors. The result does not depend
            on this number.
        part_bytes: Text that a process takes at a time. A larger part needs more memory, and more
            work is lost when a process is killed.
        source, suffixes, text_field, undecodable, document_bytes: See ``Corpus``.

    Raises:
        ValueError: A number is out of range; the message names it.
    """

    vocabulary_size: int | None = 8192
    seed: Count = 0
    chunk_tokens: int = CHUNK_TOKENS
    control_symbols: tuple[str, ...] = ()
    tokenizer_characters: Size = 20_000_000
    part_bytes: Size = 1 << 24

    form = "text"

    def __post_init__(self) -> None:
        Corpus.__post_init__(self)
        Preparation.__post_init__(self)
        if not str(self.output):
            raise ValueError("output='' (data_dir) must be the path of a folder")
        symbols = self.control_symbols
        if not all(symbols) or len(set(symbols)) < len(symbols):
            raise ValueError(
                f"control_symbols={symbols!r} must be different pieces, such as ['[CLS]', "
                "'[SEP]', '[MASK]']"
            )
        if self.vocabulary_size is not None:
            check_integer("vocabulary_size", self.vocabulary_size, least=262, most=(1 << 31) - 1)
        elif self.tokenizer_dir is None:
            raise ValueError(
                "vocabulary_size=None is the vocabulary size of tokenizer_dir, which is not "
                "set. Give a number"
            )
        check_integer("chunk_tokens", self.chunk_tokens, least=2, most=1 << 29)
        check_integer("document_bytes", self.document_bytes, least=1 << 10)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that determine the contents of the folder."""
        return self._settings(source=self.roots)

    def given_tokenizer(self) -> AnyTokenizer | None:
        """Return the tokenizer in ``tokenizer_dir``, if the settings name one.

        Raises:
            TokenizerError: Its size or its control symbols are not those of the settings.
        """
        if self.tokenizer_dir is None:
            return None
        tokenizer = load_tokenizer(self.tokenizer_dir)
        if self.vocabulary_size not in (None, tokenizer.vocabulary_size):
            raise TokenizerError(
                f"tokenizer_dir={self.tokenizer_dir} has a vocabulary of "
                f"{tokenizer.vocabulary_size}, but vocabulary_size={self.vocabulary_size}. Use "
                "that of the tokenizer"
            )
        _ = tokenizer.eos_id  # a Hugging Face tokenizer may have none
        for symbol in self.control_symbols:
            tokenizer.control_id(symbol)
        return tokenizer

    def build(self, work: Path, folder: Path, report: Reporter) -> BuiltStore:
        """Divide the text, learn the tokenizer unless one is given, and write the tokens."""
        builder = Builder(config=self, work=work, report=report)
        found = builder.survey()
        tokenizer = self.given_tokenizer() or builder.tokenizer(found)
        splits = builder.tokens(found, tokenizer, folder)
        counts = {
            "documents": found.documents,
            "characters": found.characters,
            "content": found.digest,
            "undecodable": len(found.undecodable),
        }
        return tokenizer, splits, counts


@dataclass(frozen=True, kw_only=True)
class Builder:
    """One preparation.

    Attributes:
        config: Configuration of the preparation.
        work: Work folder.
        report: Reporter of the progress.
    """

    config: PrepareConfig
    work: Path
    report: Reporter

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Text of the corpus, in parts."""
        return tuple(grouped(self.config.pieces(self.config.files()), self.config.part_bytes))

    def survey(self) -> Survey:
        """Return the division into splits."""
        saved = read_record(self.work / "survey.json")
        if saved is not None:
            result = Survey.from_json(saved)
            self.report.say(f"continuing with {result.documents:,} documents that were read before")
            return result
        task = partial(_scan_part, self.config)
        result = survey(
            self._each(task, "read"),
            validation_fraction=self.config.validation_fraction,
            seed=self.config.seed,
        )
        if result.undecodable:
            self.report.say(ReadReport(undecodable=result.undecodable).summary())
        write_record(self.work / "survey.json", result.to_json())
        return result

    def tokenizer(self, found: Survey) -> Tokenizer:
        """Return the tokenizer, learned from the training text or loaded from an earlier run."""
        if (self.work / "tokenizer.done").exists():
            return Tokenizer.load(self.work)
        assert self.config.vocabulary_size is not None, (
            "only with tokenizer_dir, whose tokenizer is not learned"
        )
        self.report.say(
            f"learning a vocabulary of {self.config.vocabulary_size} pieces from "
            f"{found.documents:,} documents"
        )
        sample = self.work / "sample.txt"
        with open(sample, "wb") as stream:
            for text in self.sample(found):
                stream.write(f"{text}\n".encode())
        learn = partial(_learn, self.config.vocabulary_size, self.config.control_symbols)
        in_process = (
            self.config.num_workers == 1 and found.characters <= self.config.tokenizer_characters
        )
        tokenizer = learn(sample) if in_process else call_in_process(learn, sample)
        sample.unlink()
        tokenizer.save(self.work)
        (self.work / "tokenizer.done").touch()
        return tokenizer

    def sample(self, found: Survey) -> Iterator[str]:
        """Yield the training text for the tokenizer.

        This is all of the training text, or as many lines as allowed, drawn evenly over the corpus.
        """
        left = self.config.tokenizer_characters
        fraction = left / found.characters
        task = partial(_sample_part, self.config, found.split, fraction)
        with closing(self._each(task, "sample")) as samples:
            for texts in samples:
                for text in texts:
                    yield text[:left] if fraction < 1 else text
                    left -= len(text)
                    if left <= 0 and fraction < 1:
                        return

    def tokens(
        self, found: Survey, tokenizer: AnyTokenizer, folder: Path
    ) -> dict[str, SplitRecord]:
        """Write both splits into ``folder``.

        Raises:
            CorpusError: The text has changed since the survey.
        """
        dtype = token_dtype(tokenizer.vocabulary_size)
        parts = self.work / "parts"
        task = partial(_tokenize_part, self.config, found.split, tokenizer, dtype, parts)
        records = list(self._each(task, "tokenize"))
        seen = sum(record["seen"] for record in records)
        if seen != found.documents:
            raise CorpusError(
                f"source={self.config.source!r} changed while it was read: it had "
                f"{found.documents} documents, then {seen}"
            )
        splits: dict[str, SplitRecord] = {}
        for split in SPLITS:
            runs = (
                np.fromfile(_part_file(parts, number, split), dtype)
                for number in range(len(records))
            )
            tokens = write_chunks(
                folder / split, runs, chunk_tokens=self.config.chunk_tokens, dtype=dtype
            )
            documents = sum(record["documents"][split] for record in records)
            splits[split] = SplitRecord(documents=documents, tokens=tokens, dtype=dtype)
        total = sum(record.tokens for record in splits.values())
        self.report.say(f"tokenized {seen:,} of {found.documents:,} documents: {total:,} tokens")
        return splits

    def _each(
        self, task: Callable[[tuple[int, Part]], Result], verb: str
    ) -> Generator[Result, None, None]:
        """Yield the results for all parts in order, with a progress bar."""
        sizes = [sum(piece.stop - piece.start for piece in part) for part in self.parts]
        with self.report.bar(verb, sum(sizes)) as advance:
            results = ordered_map(task, enumerate(self.parts), num_workers=self.config.num_workers)
            with closing(results):
                for size, result in zip(sizes, results, strict=True):
                    advance(size)
                    yield result


def _scan_part(config: PrepareConfig, item: tuple[int, Part]) -> Scan:
    report = ReadReport()
    documents = config.read(item[1], report)
    return scan(documents, seed=config.seed, undecodable=report.undecodable)


def _sample_part(
    config: PrepareConfig, split: Split, fraction: float, item: tuple[int, Part]
) -> list[str]:
    """Return training texts, or lines of them, each with the probability ``fraction``."""
    texts = []
    for document in config.read(item[1], ReadReport()):
        text = split.parts(document)[0]
        if fraction >= 1:
            texts.append(text)
            continue
        # One generator per document makes the draws independent of the division into parts. Python
        # guarantees that random() of a seed stays the same.
        draw = random.Random(f"{config.seed}/{document.name}")
        texts += [line for line in text.split("\n") if draw.random() < fraction]
    return texts


def _learn(vocabulary_size: int, control_symbols: tuple[str, ...], sample: Path) -> Tokenizer:
    with open(sample, encoding="utf-8", newline="\n") as lines:
        texts = (line.removesuffix("\n") for line in lines)
        return Tokenizer.train(
            texts, vocabulary_size=vocabulary_size, control_symbols=control_symbols
        )


def _tokenize_part(
    config: PrepareConfig,
    split: Split,
    tokenizer: AnyTokenizer,
    dtype: TokenType,
    folder: Path,
    item: tuple[int, Part],
) -> dict[str, Any]:
    """Write the tokens of one part, unless an earlier run has written them."""
    number, part = item
    files: dict[str, Path] = {name: _part_file(folder, number, name) for name in SPLITS}
    record_file = folder / f"{number:06}.json"
    record = read_record(record_file)
    if record is not None and record["bytes"] == _sizes(files):
        return dict(record)
    documents: dict[str, int] = dict.fromkeys(SPLITS, 0)
    report = ReadReport()
    threads = (os.cpu_count() or 1) if config.num_workers == 1 else 1
    with ExitStack() as stack:
        streams = {name: stack.enter_context(open(file, "wb")) for name, file in files.items()}
        for batch in _batches(config.read(part, report), split):
            for name, texts in batch.items():
                documents[name] += len(texts)
                for ids in tokenizer.encode_many(texts, num_threads=threads):
                    np.array([*ids, tokenizer.eos_id], dtype).tofile(streams[name])
    record = {"seen": report.documents, "documents": documents, "bytes": _sizes(files)}
    write_record(record_file, record)
    return record


def _batches(documents: Iterable[Document], split: Split) -> Iterator[dict[str, list[str]]]:
    """Yield texts by split, a few megabytes at a time."""
    batch: dict[str, list[str]] = {name: [] for name in SPLITS}
    characters = 0
    for document in documents:
        for texts, part in zip(batch.values(), split.parts(document), strict=True):
            if part:
                texts.append(part)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch = {name: [] for name in SPLITS}
            characters = 0
    yield batch


def _part_file(folder: Path, number: int, split: str) -> Path:
    return folder / f"{number:06}.{split}.bin"


def _sizes(files: Mapping[str, Path]) -> dict[str, int]:
    return {name: file.stat().st_size if file.exists() else -1 for name, file in files.items()}
