"""Data module for text, prepared once, and the settings of its preparation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lightning_ptdp.base.option_types import (
    Count,
    Size,
    check_arguments,
    check_fraction,
    check_integer,
)
from lightning_ptdp.data.corpus import DEFAULT_SUFFIXES, Corpus
from lightning_ptdp.data.corpus_build import Builder
from lightning_ptdp.data.data_error import TokenizerError
from lightning_ptdp.data.huggingface_tokenizer import AnyTokenizer, load_tokenizer
from lightning_ptdp.data.manifest import SplitName, SplitRecord, verify_store
from lightning_ptdp.data.preparation_work import Reporter
from lightning_ptdp.data.prepare import Preparation
from lightning_ptdp.data.prepared_datamodule import PreparedDataModule
from lightning_ptdp.data.stream import SampleStream, TokenStream
from lightning_ptdp.data.token_store import CHUNK_TOKENS


class TextDataModule(PreparedDataModule):
    """Text as batches of tokens.

    The first training process (or ``ptdp prepare``) tokenizes the text into ``data_dir``; later
    runs use that folder.

    Args:
        data_dir: Folder of the prepared data.
        source: A text file, a JSON-lines file, a folder, or a list of them. Default: the sources of
            the standard library.
        suffixes: File name endings to read from a folder.
        text_field: Key of the text in JSON lines.
        undecodable: Treatment of text that is not UTF-8.
        vocabulary_size: Number of ids of the tokenizer. None: that of ``tokenizer_dir``.
        validation_fraction: Fraction of the text used for validation.
        split_seed: Seed of the division into training and validation.
        tokenizer_dir: Folder whose tokenizer is used: another prepared folder, or a Hugging Face
            folder with a tokenizer. Default: learn one from the text. ``ptdp`` uses ``model.path``
            if the model has one.
        overwrite: Prepare again if data_dir was made with other settings or is damaged.
        remote: Address of a prepared folder in a store (any address of fsspec: s3://, gs://, …). The
            folder is copied to ``data_dir`` and nothing is prepared. Use
            ``local:/path`` for a mounted store.
        prepare_workers: Number of processes that tokenize the text during the preparation.
        verify_hashes: Compare the hash of every file before training, not only its size.
        kwargs: Arguments of ``StreamDataModule``: sequence_length, batch sizes, seed.
    """

    control_symbols: tuple[str, ...] = ()
    """Additional pieces of the tokenizer, which do not occur in text."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        data_dir: str,
        source: str | list[str] | None = None,
        suffixes: list[str] | None = None,
        text_field: str = "text",
        undecodable: Literal["replace", "skip", "error"] = "replace",
        vocabulary_size: int | None = 8192,
        validation_fraction: float = 0.03,
        split_seed: int = 0,
        tokenizer_dir: str | None = None,
        overwrite: bool = False,
        remote: str | None = None,
        prepare_workers: int = 1,
        verify_hashes: bool = True,
        **kwargs: Any,
    ) -> None:
        check_arguments(TextDataModule.__init__, locals())
        prepare_config = PrepareConfig(
            output=data_dir,
            source=source,
            suffixes=DEFAULT_SUFFIXES if suffixes is None else tuple(suffixes),
            text_field=text_field,
            undecodable=undecodable,
            vocabulary_size=vocabulary_size,
            validation_fraction=validation_fraction,
            seed=split_seed,
            tokenizer_dir=tokenizer_dir,
            overwrite=overwrite,
            num_workers=prepare_workers,
            control_symbols=self.control_symbols,
        )
        super().__init__(
            prepare_config=prepare_config, remote=remote, verify_hashes=verify_hashes, **kwargs
        )
        # Checkpoints name the data folder, which contains the tokenizer.
        self.save_hyperparameters()
        if self.sequence_length >= prepare_config.chunk_tokens:
            raise ValueError(
                f"sequence_length={self.sequence_length} must be less than "
                f"{prepare_config.chunk_tokens}, the number of tokens in a chunk"
            )
        if vocabulary_size is None:
            assert tokenizer_dir is not None, "PrepareConfig has refused that"
            vocabulary_size = load_tokenizer(tokenizer_dir).vocabulary_size
        self.vocabulary_size = vocabulary_size

    @cached_property
    def tokenizer(self) -> AnyTokenizer:
        """Tokenizer of the prepared data."""
        return load_tokenizer(self.data_dir)

    def setup(self, stage: str | None = None) -> None:
        """Check in every process that ``data_dir`` matches its manifest.

        Raises:
            DataError: It does not match, or it has another vocabulary size.
        """
        verify_store(self.data_dir, hashes=False, vocabulary_size=self.vocabulary_size)

    def _stream(self, split: SplitName, max_samples: int | None = None) -> SampleStream:
        return TokenStream(
            self.data_dir,
            split=split,
            sequence_length=self.sequence_length,
            max_samples=max_samples,
        )


# ---- Checked settings of a preparation of text ---------------------------------------------------


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
        super().__post_init__()
        if not str(self.output):
            raise ValueError("output='' (data_dir) must be the path of a folder")
        if "://" in str(self.output):
            raise ValueError(
                f"output={str(self.output)!r} is a URL. Give a local folder, and copy it to "
                "the store afterwards. To train on data in a store, set remote to its URL and "
                "data_dir to a local folder for the copy"
            )
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
        check_fraction("validation_fraction", self.validation_fraction)

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

    def build(
        self, work: Path, folder: Path, report: Reporter
    ) -> tuple[AnyTokenizer, dict[str, SplitRecord], dict[str, Any]]:
        """Divide the text, learn the tokenizer unless one is given, and write the tokens."""
        builder = Builder(config=self, work=work, report=report)
        survey = builder.survey()
        tokenizer = self.given_tokenizer() or builder.tokenizer(survey)
        splits = builder.tokens(survey, tokenizer, folder)
        counts = {
            "documents": survey.documents,
            "characters": survey.characters,
            "content": survey.digest,
            "undecodable": len(survey.undecodable),
        }
        return tokenizer, splits, counts
