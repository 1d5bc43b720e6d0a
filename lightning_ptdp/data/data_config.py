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
"""Settings that older folders do not name, with the value that is equivalent to their absence."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(Corpus):
    """Source, destination and options of a preparation.

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
        """Return the settings that determine the contents of the folder.

        They have the form in which the manifest keeps them.
        """
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
