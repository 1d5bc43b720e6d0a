"""Preparation of conversations: rows in, tokenized samples out.

A sample is stored at its full length. It is cut or packed into sequences only when it is read.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from lightning_ptdp.base.option_types import Count
from lightning_ptdp.checkpoint.files import sha256
from lightning_ptdp.data.chat_format import ChatFormat, Learn, read_template
from lightning_ptdp.data.conversations import Columns, FaultyRow, Paths, Rows, chat_files, read_rows
from lightning_ptdp.data.corpus import list_files
from lightning_ptdp.data.data_error import CorpusError, TokenizerError
from lightning_ptdp.data.file_pieces import CorpusFile
from lightning_ptdp.data.huggingface_tokenizer import HuggingFaceTokenizer
from lightning_ptdp.data.manifest import SPLITS, Form, SplitRecord
from lightning_ptdp.data.preparation_work import Reporter, ordered_map
from lightning_ptdp.data.prepare import BuiltStore, Preparation
from lightning_ptdp.data.split import score
from lightning_ptdp.data.token_store import CHUNK_TOKENS, mark_sample, write_chunks

ROWS_AT_ONCE = 256
"""Rows that a process tokenizes together, and in which columns are looked for."""
IMAGES_FILE = "images.json"
"""File of a split that lists the images of every sample, each with its size in bytes."""

Encoded = tuple[int, int, np.ndarray, list[Any]]
"""Hash and number of characters of a conversation, its tokens with their marks, and its images."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig(Preparation):
    """Source, destination and options of a preparation of conversations.

    ``ChatDataModule`` documents the fields.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    path: str | list[str] | None = None
    validation_path: str | list[str] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    learn: Learn = "answers"
    faulty: Literal["error", "drop"] = "error"
    split_seed: Count = 0

    form: ClassVar[Form] = "chat"
    columns_class: ClassVar[type[Columns]] = Columns
    tokenizer_class: ClassVar[type[HuggingFaceTokenizer]] = HuggingFaceTokenizer
    format_class: ClassVar[type[ChatFormat]] = ChatFormat
    checks_every_row: ClassVar[bool] = False
    """Check the content of every row before launch, not only the first ones."""
    about: ClassVar[str] = "docstrings"
    """Content of the rows without a path."""

    def rows(self, path: Paths, split: str) -> Rows:
        """Yield the rows of a path, or without one those about the standard library."""
        return read_rows(path, split=split)

    def content(self, columns: Columns, row: Mapping[str, Any]) -> Any:
        """Return the content of a row, which ``encode`` accepts.

        Raises:
            FaultyRow: The row has no usable conversation.
        """
        return columns.content(row)

    def encode(self, form: ChatFormat, content: Any) -> tuple[Any, np.ndarray, list[Any]]:
        """Return what distinguishes a content from others, its tokens with marks, and its images.

        Raises:
            FaultyRow: The chat template rejects the content.
        """
        return content, mark_sample(*form.encode(content)), []

    def given_tokenizer(self) -> HuggingFaceTokenizer:
        """Return the tokenizer of the model.

        Raises:
            TokenizerError: ``tokenizer_dir`` is not set or does not exist.
        """
        if self.tokenizer_dir is None:
            raise TokenizerError(
                "tokenizer_dir=None. Give the folder of the tokenizer, which is usually that "
                "of the model"
            )
        return self.tokenizer_class(self.tokenizer_dir)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that determine the contents of the folder, with a hash of the template.

        Raises:
            TokenizerError: The file of the chat template does not exist.
        """
        template = (
            None
            if self.chat_template is None
            else sha256(read_template(self.chat_template).encode())
        )
        # The hash of the tokenizer is compared; its folder may have moved.
        values = self._settings(tokenizer_dir=None, chat_template=template)
        return values if self.form == "chat" else {**values, "form": self.form}

    @property
    def folder(self) -> str:
        """Folder for data prepared with these settings."""
        settings = json.dumps(
            {**self.settings, "tokenizer": self.given_tokenizer().fingerprint}, sort_keys=True
        )
        name = Path(self.roots[0]).stem if self.roots else self.about
        return f"ptdp-data/{name}-{sha256(settings.encode())[:8]}"

    @property
    def roots(self) -> tuple[str, ...]:
        """The given paths, those for validation last."""
        return tuple(root for path, _ in self._sources() for root in _listed(path))

    def files(self) -> list[CorpusFile]:
        """Return the files of all paths, and those inside of folders that ``datasets`` saved."""
        found = chat_files(self.roots) if self.roots else []
        return [file for path in found for file in list_files(path, ("",))]

    def check_source(self) -> None:
        """Check the files, the columns, and the template on the first row."""
        for path, split in self._sources():
            next(_encoded(self, path, split, Counter()), None)
            if self.checks_every_row and self.faulty == "error" and path is not None:
                for file in map(str, chat_files(path)):
                    self._check_file(file, split)

    def _check_file(self, file: str, split: str) -> None:
        columns, rows = _numbered_rows(self, file, split)
        for number, row in rows:
            try:
                self.content(columns, row)
            except FaultyRow as error:
                raise _refused(file, number, error) from error

    def build(self, work: Path, folder: Path, report: Reporter) -> BuiltStore:
        """Tokenize all rows, divide them, and write the tokens."""
        faulty = Counter[str]()
        file = work / "parts" / "tokens.bin"
        origins = array("B")
        lengths = array("q")
        scores = array("Q")
        characters = 0
        images: list[list[Any]] = []
        with open(file, "wb") as stream:
            for origin, (path, split) in enumerate(self._sources()):
                for digest, size, tokens, shown in _encoded(self, path, split, faulty):
                    tokens.tofile(stream)
                    origins.append(origin)
                    lengths.append(len(tokens))
                    scores.append(digest)
                    characters += size
                    images.append(shown)
        if len(set(origins)) < len(self._sources()):
            raise CorpusError("the data have no conversation")
        held_out = np.array(origins, bool)
        if self.validation_path is None:
            held_out = _validation(np.array(scores), self.validation_fraction)
        all_tokens = np.memmap(file, np.int32, "r")
        ends = np.cumsum(lengths)
        splits: dict[str, SplitRecord] = {}
        for split, mask in zip(SPLITS, (~held_out, held_out), strict=True):
            runs = (all_tokens[ends[i] - lengths[i] : ends[i]] for i in np.flatnonzero(mask))
            count = write_chunks(folder / split, runs, chunk_tokens=CHUNK_TOKENS, dtype="int32")
            if self.form == "image_chat":
                shown = [images[index] for index in np.flatnonzero(mask)]
                (folder / split / IMAGES_FILE).write_text(json.dumps(shown), "utf-8")
            splits[split] = SplitRecord(documents=int(mask.sum()), tokens=count, dtype="int32")
        for reason, number in faulty.most_common(3):
            report.say(f"{number:,} rows were left out: {reason}")
        counts = {
            "documents": len(scores),
            "characters": characters,
            "content": sha256(scores.tobytes()),
            "undecodable": faulty.total(),
        }
        return self.given_tokenizer(), splits, counts

    def _sources(self) -> list[tuple[Paths, str]]:
        """Return the given paths, each with the split to read from a saved folder."""
        sources: list[tuple[Paths, str]] = [(self.path, "train")]
        if self.validation_path is not None:
            sources.append((self.validation_path, "validation"))
        return sources


def _validation(scores: np.ndarray, fraction: float) -> np.ndarray:
    """Return a mask of the validation samples: those with the lowest hashes.

    Equal samples have equal hashes and therefore stay in the same split.
    """
    count = max(round(fraction * len(scores)), 1)
    chosen: np.ndarray = scores <= np.sort(scores)[count - 1]
    if chosen.all():
        distinct = len(np.unique(scores))
        raise CorpusError(
            f"the data have {distinct}{' different' * (len(scores) > distinct)} "
            f"conversation{'s' * (distinct > 1)}, too few for a split. Give more, or a "
            "separate file for validation (validation_path)"
        )
    return chosen


def _numbered_rows(
    config: ChatConfig, path: Paths, split: str
) -> tuple[Columns, Iterator[tuple[int, dict[str, Any]]]]:
    """Return the columns that the first rows of a path have, and all rows, counted from 1.

    Raises:
        CorpusError: There is no row, or a column is missing.
    """
    rows = config.rows(path, split)
    first = list(islice(rows, ROWS_AT_ONCE))
    if not first:
        raise CorpusError(f"path={path} has no row")
    columns = config.columns_class.of(
        dict.fromkeys(name for row in first for name in row),
        config.columns,
        where="the standard library" if path is None else f"path={path}",
    )
    return columns, enumerate(chain(first, rows), start=1)


def _encoded(
    config: ChatConfig, path: Paths, split: str, faulty: Counter[str]
) -> Iterator[Encoded]:
    """Yield the conversation of every row, in the order of the rows."""
    columns, rows = _numbered_rows(config, path, split)
    batches = iter(lambda: list(islice(rows, ROWS_AT_ONCE)), [])
    form = config.format_class(
        config.given_tokenizer(), template=config.chat_template, learn=config.learn
    )
    task = partial(_encode, config, form, columns, path)
    for samples, reasons in ordered_map(task, batches, num_workers=config.num_workers):
        faulty.update(reasons)
        yield from samples


def _encode(
    config: ChatConfig,
    form: ChatFormat,
    columns: Columns,
    path: Paths,
    rows: list[tuple[int, dict[str, Any]]],
) -> tuple[list[Encoded], list[str]]:
    samples = []
    reasons = []
    for number, row in rows:
        try:
            content, tokens, images = config.encode(form, config.content(columns, row))
        except FaultyRow as error:
            if config.faulty == "error":
                raise _refused(path, number, error) from error
            reasons.append(str(error))
            continue
        text = json.dumps(content, sort_keys=True, default=str)
        samples.append((score(text, config.split_seed), len(text), tokens, images))
    return samples, reasons


def _refused(path: Paths, number: int, error: FaultyRow) -> CorpusError:
    return CorpusError(
        f"path={path}, row {number}: {error}. To leave such rows out, use faulty: drop"
    )


def _listed(path: Paths) -> Sequence[str]:
    return [path] if isinstance(path, str) else path or []
