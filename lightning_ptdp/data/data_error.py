"""Errors of the data package: each is a ``ValueError`` that names the file or the field and says
what would work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.base.untrusted import reason

__all__ = ["CorpusError", "DataError", "StoreError", "TokenizerError", "reading"]


class DataError(PTDPError, ValueError):
    """The text, the tokenizer, the token store or a position in it cannot be used."""


class CorpusError(DataError):
    """The source text is missing, unreadable, empty or not what it claims to be."""


class TokenizerError(DataError):
    """A tokenizer is damaged, or the vocabulary asked for cannot be made from the text."""


class StoreError(DataError):
    """A prepared folder is missing, incomplete, damaged or was made with other settings."""


@contextmanager
def reading(what: str | Path, kind: type[DataError], mend: str = "") -> Iterator[None]:
    """Around what reads ``what`` and looks into it: what is wrong with it is a ``kind`` that names
    it, and says how to mend it."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        # A file that is read on the way is named instead.
        name = (
            what if error.filename is None or str(error.filename) in str(what) else error.filename
        )
        raise kind(f"{name} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise kind(f"{what} is damaged: {reason(error)}; {mend}") from error
