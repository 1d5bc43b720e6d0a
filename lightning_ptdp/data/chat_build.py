"""Preparation of conversations: rows in, a folder of tokenized samples out."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lightning_ptdp.base.option_types import Count, Size, check_types
from lightning_ptdp.data.chat_format import ChatFormat, Learn, read_template
from lightning_ptdp.data.chat_store import FORM, Sample, verify_chat
from lightning_ptdp.data.conversations import Columns, FaultyRow, chat_files, read_rows
from lightning_ptdp.data.data_error import CorpusError, StoreError, TokenizerError
from lightning_ptdp.data.huggingface_tokenizer import HuggingFaceTokenizer
from lightning_ptdp.data.manifest import CorpusRecord, Manifest, SplitRecord, record_files
from lightning_ptdp.data.number_checks import check_fraction
from lightning_ptdp.data.prepare import check_place, check_settings, publish
from lightning_ptdp.data.token_store import TokenType, token_dtype
from lightning_ptdp.data.work_folder import work_folder
from lightning_ptdp.data.worker_processes import ordered_map

__all__ = ["ChatConfig", "prepare_chat"]

_log = logging.getLogger(__name__)
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Source, destination and options of a preparation of conversations.

    ``ChatDataModule`` documents the fields.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    output: str
    tokenizer_dir: str | None
    path: str | list[str] | None = None
    validation_path: str | list[str] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    learn: Learn = "answers"
    faulty: Literal["error", "drop"] = "error"
    validation_fraction: float = 0.03
    split_seed: Count = 0
    overwrite: bool = False
    num_workers: Size = 1

    def __post_init__(self) -> None:
        check_types(self)
        check_fraction("validation_fraction", self.validation_fraction)

    def tokenizer(self) -> HuggingFaceTokenizer:
        """Return the tokenizer of the model.

        Raises:
            TokenizerError: ``tokenizer_dir`` is not set or does not exist.
        """
        if self.tokenizer_dir is None:
            raise TokenizerError(
                "tokenizer_dir=None: name the folder of the tokenizer, which mostly is the model's"
            )
        return HuggingFaceTokenizer(self.tokenizer_dir)

    def format(self) -> ChatFormat:
        """Return the format in which conversations are written."""
        return ChatFormat(self.tokenizer(), template=self.chat_template, learn=self.learn)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the contents of the folder.

        Raises:
            TokenizerError: The file of the chat template does not exist.
        """
        template = (
            None
            if self.chat_template is None
            else hashlib.sha256(read_template(self.chat_template).encode()).hexdigest()
        )
        named = ("path", "validation_path", "learn", "faulty", "validation_fraction", "split_seed")
        # Convert to JSON and back, so that the settings compare equal to those of a manifest.
        values = {
            "form": FORM,
            **{name: getattr(self, name) for name in named},
            "columns": dict(self.columns),
            "chat_template": template,
        }
        return dict(json.loads(json.dumps(values)))

    @property
    def folder(self) -> str:
        """Return the folder for data prepared with these settings."""
        settings = json.dumps(
            {**self.settings, "tokenizer": self.tokenizer().fingerprint}, sort_keys=True
        )
        roots = _roots(self)
        return f"ptdp-data/{Path(roots[0]).stem if roots else 'docstrings'}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"

    def listing(self) -> str:
        """Return a hash of names and sizes of the files, to detect changes without reading them."""
        files = [
            file
            for path in (self.path, self.validation_path)
            if path is not None
            for file in chat_files(path)
        ]
        inner = chain.from_iterable(
            sorted(file.rglob("*")) if file.is_dir() else [file] for file in files
        )
        return hashlib.sha256(
            "\n".join(f"{file} {file.stat().st_size}" for file in inner).encode()
        ).hexdigest()

    def check(self, *, hashes: bool = True) -> Manifest | None:
        """Check everything that does not require reading all rows; write nothing.

        The checks cover the files, the columns, and the template on the first row.

        Returns:
            The manifest if the folder already exists, was made with the same settings and is
            intact; otherwise None.

        Raises:
            DataError: The message says what is wrong and how to correct it.
        """
        output = Path(self.output)
        manifest = check_place(
            output, overwrite=self.overwrite, check=partial(self._existing, output, hashes)
        )
        if manifest is None:
            sources = [(self.path, "train")]
            if self.validation_path is not None:
                sources.append((self.validation_path, "validation"))
            for path, split in sources:
                for _ in islice(_encoded(self, path, split, Counter()), 1):
                    pass
        return manifest

    def _existing(self, output: Path, hashes: bool) -> Manifest:
        manifest = Manifest.read(output)
        check_settings(manifest, self.settings, output)
        if manifest.tokenizer_fingerprint != self.tokenizer().fingerprint:
            raise StoreError(
                f"output={output} was prepared with another tokenizer than "
                f"tokenizer_dir={self.tokenizer_dir} now holds: use that, another "
                "folder, or overwrite (--overwrite)"
            )
        if (
            all(Path(root).exists() for root in _roots(self))
            and self.listing() != manifest.corpus.listing
        ):
            raise StoreError(
                f"output={output} was prepared from files that have changed since: use another "
                "folder, or overwrite (--overwrite)"
            )
        return verify_chat(output, hashes=hashes)


def prepare_chat(config: ChatConfig, *, hashes: bool = True) -> Manifest:
    """Prepare the folder, or return the manifest of one made with the same settings.

    Raises:
        DataError: As for ``ChatConfig.check``, or a row is faulty; the message names the row.
    """
    manifest = config.check(hashes=hashes)
    output = Path(config.output)
    if manifest is None:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            with work_folder(
                output, {"settings": config.settings, "listing": config.listing()}
            ) as work:
                folder = work / "store"
                shutil.rmtree(folder, ignore_errors=True)
                manifest = _build(config, folder, work / "parts")
                manifest = publish(
                    folder, output, manifest, overwrite=config.overwrite, check=config.check
                )
        except OSError as error:
            raise StoreError(f"output={output} cannot be written: {error}") from error
    counts = ", ".join(
        f"{record.documents:,} {name} samples ({record.tokens:,} tokens)"
        for name, record in manifest.splits.items()
    )
    _log.info("%s: %s", output, counts)
    return manifest


def _build(config: ChatConfig, folder: Path, parts: Path) -> Manifest:
    tokenizer, faulty = config.tokenizer(), Counter[str]()
    dtype = token_dtype(tokenizer.vocabulary_size)
    tokenizer.save(folder)
    first = _encoded(config, config.path, "train", faulty)
    found = _Gathered.of(first, parts / "train", dtype)
    if config.validation_path is not None:
        held = _Gathered.of(
            _encoded(config, config.validation_path, "validation", faulty),
            parts / "validation",
            dtype,
        )
        chosen = {
            "train": (found, np.ones(len(found.scores), bool)),
            "validation": (held, np.ones(len(held.scores), bool)),
        }
    else:
        validation = _validation(found.scores, config.validation_fraction)
        chosen = {"train": (found, ~validation), "validation": (found, validation)}
    splits = {
        name: gathered.write(folder / name, kept) for name, (gathered, kept) in chosen.items()
    }
    for why, count in faulty.most_common(3):
        _log.info("%s rows are left out: %s", f"{count:,}", why)
    content = hashlib.sha256(b"".join(gathered.scores.tobytes() for gathered, _ in chosen.values()))
    manifest = Manifest(
        settings=config.settings,
        python=platform.python_version(),
        corpus=CorpusRecord(
            source=_roots(config) or ["standard library"],
            files=len(_roots(config)),
            listing=config.listing(),
            documents=sum(record.documents for record in splits.values()),
            characters=found.characters,
            content=content.hexdigest(),
            undecodable=sum(faulty.values()),
        ),
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocabulary_size=tokenizer.vocabulary_size,
        splits=splits,
        files=record_files(folder),
    )
    manifest.write(folder)
    return manifest


@dataclass(frozen=True)
class _Gathered:
    """All samples of a source, in files, with a hash of each sample."""

    tokens: np.ndarray
    learned: np.ndarray
    boundaries: np.ndarray
    scores: np.ndarray
    characters: int

    @classmethod
    def of(
        cls, samples: Iterator[tuple[int, int, Sample]], folder: Path, dtype: TokenType
    ) -> _Gathered:
        folder.mkdir(parents=True, exist_ok=True)
        lengths, scores, characters = [0], [], 0
        with (
            open(folder / "tokens.bin", "wb") as tokens,
            open(folder / "learned.bin", "wb") as learned,
        ):
            for score, size, (ids, answers) in samples:
                ids.astype(dtype).tofile(tokens)
                answers.tofile(learned)
                lengths.append(len(ids))
                scores.append(score)
                characters += size
        if not scores:
            raise CorpusError("the data hold no conversation")
        return cls(
            tokens=np.memmap(folder / "tokens.bin", dtype, "r"),
            learned=np.memmap(folder / "learned.bin", bool, "r"),
            boundaries=np.cumsum(lengths, dtype=np.int64),
            scores=np.array(scores, np.uint64),
            characters=characters,
        )

    def write(self, folder: Path, kept: np.ndarray) -> SplitRecord:
        folder.mkdir()
        numbers = np.flatnonzero(kept)
        for name, values in (("tokens", self.tokens), ("learned", self.learned)):
            with open(folder / f"{name}.bin", "wb") as stream:
                for number in numbers:
                    values[self.boundaries[number] : self.boundaries[number + 1]].tofile(stream)
        boundaries = np.cumsum([0, *np.diff(self.boundaries)[numbers]], dtype=np.int64)
        boundaries.tofile(folder / "boundaries.bin")
        dtype: TokenType = "uint16" if self.tokens.dtype == np.uint16 else "int32"
        return SplitRecord(documents=len(numbers), tokens=int(boundaries[-1]), dtype=dtype)


def _validation(scores: np.ndarray, fraction: float) -> np.ndarray:
    """Return a mask of the validation samples: those with the lowest hashes.

    Equal samples have equal hashes and therefore stay in the same split.
    """
    count = max(round(fraction * len(scores)), 1)
    chosen: np.ndarray = scores <= np.sort(scores)[count - 1]
    if chosen.all():
        different = len(np.unique(scores))
        raise CorpusError(
            f"the data hold {different}{' different' * (len(scores) > different)} "
            f"conversation{'s' * (different > 1)}, too few to divide: "
            "give more, or a file of its own for validation (validation_path)"
        )
    return chosen


def _encoded(
    config: ChatConfig, path: str | Sequence[str] | None, split: str, faulty: Counter[str]
) -> Iterator[tuple[int, int, Sample]]:
    """Yield (hash, characters, sample) of every row, in the order of the rows."""
    rows = read_rows(path, split=split)
    first = next(rows, None)
    if first is None:
        raise CorpusError(f"path={path} holds no row")
    columns = Columns.of(
        first, config.columns, where="the standard library" if path is None else f"path={path}"
    )
    numbered = enumerate(chain([first], rows), start=1)
    batches = iter(lambda: list(islice(numbered, _ROWS_AT_ONCE)), [])
    task = partial(
        _encode, config.format(), columns, config.split_seed, config.faulty == "drop", path
    )
    for found, left_out in ordered_map(task, batches, num_workers=config.num_workers):
        faulty.update(left_out)
        yield from found


def _encode(
    form: ChatFormat,
    columns: Columns,
    seed: int,
    drop: bool,
    path: str | Sequence[str] | None,
    rows: list[tuple[int, dict[str, Any]]],
) -> tuple[list[tuple[int, int, Sample]], list[str]]:
    found, left_out = [], []
    for number, row in rows:
        try:
            conversation = columns.conversation(row)
            sample = form.encode(conversation)
        except FaultyRow as error:
            if not drop:
                raise CorpusError(
                    f"path={path}, row {number}: {error}. Or leave such rows out (faulty: drop)"
                ) from error
            left_out.append(str(error))
            continue
        text = json.dumps(conversation, sort_keys=True, default=str)
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=seed.to_bytes(8, "big")).digest()
        found.append((int.from_bytes(digest, "big"), len(text), sample))
    return found, left_out


def _roots(config: ChatConfig) -> list[str]:
    paths = [path for path in (config.path, config.validation_path) if path is not None]
    return [root for path in paths for root in ([path] if isinstance(path, str) else path)]
