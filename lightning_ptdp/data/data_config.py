"""Checked settings of a preparation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightning_ptdp.base.option_types import Size
from lightning_ptdp.data.corpus import Corpus
from lightning_ptdp.data.number_checks import check_fraction, check_integer

__all__ = ["PrepareConfig"]

_NOT_SETTINGS = ("output", "overwrite", "num_workers", "part_bytes")
_LATER = {"control_symbols": (), "tokenizer_dir": None, "document_bytes": 1 << 22}
"""Settings that folders from before there were any do not name, and what is the same as none."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(Corpus):
    """Which text to prepare, where, and how.

    Args:
        output: The folder to make.
        vocabulary_size: Number of ids of the tokenizer, special ones included; None: as many as
            that of ``tokenizer_dir`` has.
        validation_fraction: Part of the characters that is kept for validation, more than 0 and at
            most 0.5.
        seed: Of the division and of the sample that the tokenizer learns from.
        chunk_tokens: Tokens of a chunk file; a training sample never spans two chunks.
        control_symbols: Pieces such as ``[MASK]`` that no text produces; they count into
            ``vocabulary_size``.
        tokenizer_dir: Another prepared folder, whose tokenizer is taken, so that the two can be
            mixed; or a folder of Hugging Face's, such as a model's, with its tokenizer. Default:
            learn one from the text.
        tokenizer_characters: How much of the training text the tokenizer learns from at most (lines
            drawn at random).
        overwrite: Replace a folder that was prepared with other settings or is damaged.
        num_workers: Processes that read and tokenize. With 1 it is this one, whose tokenizer takes
            as many threads as there are processors. The result does not depend on it.
        part_bytes: Text that a process takes at a time: more takes more memory, and is lost where
            one is killed.
        source, suffixes, text_field, undecodable, document_bytes: Those of ``Corpus``.

    Raises:
        ValueError: A number is out of range; the message names it.
    """

    output: str | Path
    vocabulary_size: int | None = 8192
    validation_fraction: float = 0.03
    seed: int = 0
    chunk_tokens: int = 1 << 22
    control_symbols: tuple[str, ...] = ()
    tokenizer_dir: str | Path | None = None
    tokenizer_characters: Size = 20_000_000
    overwrite: bool = False
    num_workers: Size = 1
    part_bytes: Size = 1 << 24

    def __post_init__(self) -> None:
        super().__post_init__()
        if not str(self.output):
            raise ValueError("output='' (data_dir) must be the path of a folder")
        if "://" in str(self.output):
            raise ValueError(
                f"output={str(self.output)!r} is an address: name a local folder, and copy it to "
                "the store when it is made. To train "
                "on one in a store, set remote to its address and data_dir to a local folder for "
                "the copy"
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
                "vocabulary_size=None is that of tokenizer_dir, which names no folder: give a "
                "number"
            )
        check_integer("seed", self.seed, least=0, most=(1 << 63) - 1)
        check_integer("chunk_tokens", self.chunk_tokens, least=2, most=1 << 29)
        check_integer("document_bytes", self.document_bytes, least=1 << 10)
        check_fraction("validation_fraction", self.validation_fraction)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the contents of the folder, as the manifest keeps
        them."""
        values = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_SETTINGS
        }
        values = {
            name: value
            for name, value in values.items()
            if name not in _LATER or value != _LATER[name]
        }
        if self.tokenizer_dir is not None:
            values["tokenizer_dir"] = str(self.tokenizer_dir)
        if self.control_symbols:
            values["control_symbols"] = list(self.control_symbols)
        return {**values, "source": list(self.roots), "suffixes": list(self.suffixes)}
