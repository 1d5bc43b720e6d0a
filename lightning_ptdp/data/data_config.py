"""Checked settings of a preparation of text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ptdp.base.option_types import Count, Size
from lightning_ptdp.data.corpus import Corpus
from lightning_ptdp.data.corpus_build import Builder
from lightning_ptdp.data.data_error import TokenizerError
from lightning_ptdp.data.huggingface_tokenizer import AnyTokenizer, load_tokenizer
from lightning_ptdp.data.manifest import Form, SplitRecord
from lightning_ptdp.data.number_checks import check_fraction, check_integer
from lightning_ptdp.data.preparation_progress import Reporter
from lightning_ptdp.data.prepare import Preparation
from lightning_ptdp.data.token_store import CHUNK_TOKENS

__all__ = ["PrepareConfig"]


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
    def form(self) -> Form:
        """Documents."""
        return "text"

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
