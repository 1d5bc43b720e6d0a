"""Errors of the data package.

Each is a ``ValueError`` that names the file or field and says what works.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.base.untrusted import reason


class DataError(PTDPError, ValueError):
    """The text, the tokenizer, the token store or a position in it cannot be used."""


class CorpusError(DataError):
    """The source text is missing, unreadable, empty, or does not have the claimed format."""


class TokenizerError(DataError):
    """A tokenizer is damaged, or the text does not suffice for the requested vocabulary."""


class StoreError(DataError):
    """A prepared folder is missing, incomplete, damaged, or was made with other settings."""


@contextmanager
def reading(what: str | Path, kind: type[DataError], remedy: str = "") -> Iterator[None]:
    """Convert errors of the enclosed code, which reads ``what``, into a ``kind``.

    The message names ``what`` and gives the correction ``remedy``.
    """
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        # If the failing file is another one, name that file.
        name = (
            what if error.filename is None or str(error.filename) in str(what) else error.filename
        )
        raise kind(f"{name} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise kind(f"{what} is damaged: {reason(error)}. {remedy}") from error
