"""What the data room raises: always a ``ValueError`` that names the file or the field and says what would work."""

from __future__ import annotations

__all__ = ["CorpusError", "DataError", "StoreError", "TokenizerError"]


class DataError(ValueError):
    """The text, the tokenizer, the token store or a position in it cannot be used."""


class CorpusError(DataError):
    """The source text is missing, unreadable, empty or not what it claims to be."""


class TokenizerError(DataError):
    """A tokenizer is damaged, or the vocabulary asked for cannot be made from the text."""


class StoreError(DataError):
    """A prepared folder is missing, incomplete, damaged or was made with other settings."""
