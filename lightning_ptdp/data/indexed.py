"""Reader of Megatron-LM's indexed dataset.

The dataset is read in place: ``PREFIX.bin`` holds the tokens, ``PREFIX.idx`` the beginnings of
documents. Both files are mapped into memory. The index, little-endian::

    b"MMIDIDX\\0\\0"  version 1 (u64)  type of a token (u8)  sequences (u64)  document boundaries (u64)
    tokens of every sequence (i32)  its first byte in PREFIX.bin (i64)  first sequence of every document, and the end (i64)

(format of ``megatron/core/datasets/indexed_dataset.py``). A document is one sequence or several. No
token marks the end of a document unless the writer appended one (``--append-eod``).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lightning_ptdp.data.data_error import StoreError, reading

__all__ = ["IndexedFile"]

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_OTHER_TYPES = {6: "float64", 7: "float32"}
_AT_ONCE = 1 << 22  # Numbers per step of a check: memory must not grow with the data.
_PAGES, _PAGE = 64, 4096


class IndexedFile:
    """Documents of one pair of files.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.

    Attributes:
        prefix: Path without ``.bin`` and ``.idx``, as given.
        tokens: All tokens, mapped, 1-D in the stored integer type.
        boundaries: int64; document ``i`` is ``tokens[boundaries[i] : boundaries[i + 1]]``.

    Raises:
        StoreError: A file is missing, has another format, is truncated, does not match the other
            file, or holds no token ids. The message names the file.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in (index, data):
            if not path.is_file():
                raise StoreError(
                    f"{path} is missing: give the prefix of a pair of files, PREFIX.bin and "
                    "PREFIX.idx"
                )
        with reading(index, StoreError):
            self.boundaries = self._read_index(index, data)
            # An empty file cannot be mapped.
            self.tokens = (
                np.memmap(data, self._dtype, "r")
                if data.stat().st_size
                else np.empty(0, self._dtype)
            )
        self._index, self._data = index, data

    def __reduce__(self) -> tuple[type[IndexedFile], tuple[str]]:
        """Pickle only the path; the copy maps the file again."""
        return IndexedFile, (self.prefix,)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.boundaries) - 1

    def check_tokens(self, vocabulary_size: int) -> None:
        """Check that all tokens are ids of this vocabulary.

        Reads all tokens once, a few megabytes at a time.

        Raises:
            StoreError: A token is outside the vocabulary. The message names it, its position and
                its document.
        """
        if np.iinfo(self._dtype).min >= 0 and np.iinfo(self._dtype).max < vocabulary_size:
            return
        for start in range(0, len(self.tokens), _AT_ONCE):
            self.check_some(self.tokens[start : start + _AT_ONCE], start, vocabulary_size)

    def check_some(self, tokens: np.ndarray, start: int, vocabulary_size: int) -> None:
        """Check a run of tokens that begins at ``start``.

        Raises:
            StoreError: As for ``check_tokens``.
        """
        if not len(tokens) or (tokens.min() >= 0 and tokens.max() < vocabulary_size):
            return
        place = start + int(np.flatnonzero((tokens < 0) | (tokens >= vocabulary_size))[0])
        document = int(np.searchsorted(self.boundaries, place, side="right")) - 1
        raise StoreError(
            f"{self._data}: token {place} (document {document}) is {int(tokens[place - start])}, "
            "outside vocabulary_size="
            f"{vocabulary_size}: set the size of the tokenizer that made the file"
        )

    def fingerprint(self) -> str:
        """Return a hash of the index and of pages spread evenly over the tokens.

        It detects other data without reading all of them.
        """
        digest = hashlib.sha256()
        with open(self._index, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
        size = self._data.stat().st_size
        with open(self._data, "rb") as stream:
            for page in range(_PAGES):
                stream.seek(max(size - _PAGE, 0) * page // (_PAGES - 1))
                digest.update(stream.read(_PAGE))
        return digest.hexdigest()

    def _read_index(self, index: Path, data: Path) -> np.ndarray:
        """Return the boundaries and set the type of a token."""
        with open(index, "rb") as stream:
            header = stream.read(_HEADER.size)
        if not header.startswith(_MAGIC) or len(header) < _HEADER.size:
            raise StoreError(
                f"{index} is no index of Megatron-LM's mapped format: it does not begin with "
                f"{_MAGIC!r} and a header"
            )
        _, version, code, sequences, boundaries = _HEADER.unpack(header)
        if version != 1:
            raise StoreError(f"{index} is of version {version}; version 1 can be read")
        if code not in _TOKEN_TYPES:
            held = _OTHER_TYPES.get(code, f"an unknown type (code {code})")
            raise StoreError(f"{index}: {data.name} holds {held}, and token ids are integers")
        self._dtype = np.dtype(_TOKEN_TYPES[code])
        size, wanted = index.stat().st_size, _HEADER.size + 12 * sequences + 8 * boundaries
        if size != wanted:
            more = (
                "; it may be a multimodal one, which has a mode for every sequence"
                if size == wanted + sequences
                else ""
            )
            raise StoreError(
                f"{index} has {size} bytes, but its {sequences} sequences and {boundaries} "
                f"boundaries take {wanted}{more}"
            )
        if not sequences or boundaries < 2:
            raise StoreError(f"{index} holds no document")
        raw = np.memmap(index, np.uint8, "r", offset=_HEADER.size)
        lengths, pointers, firsts = (
            part.view(kind)
            for part, kind in zip(
                np.split(raw, [4 * sequences, 12 * sequences]), ("<i4", "<i8", "<i8"), strict=True
            )
        )
        total = _check_joined(index, lengths, pointers, self._dtype.itemsize)
        found = data.stat().st_size
        if found != total * self._dtype.itemsize:
            raise StoreError(
                f"{data} has {found} bytes, but {index.name} counts {total} tokens of "
                f"{self._dtype.itemsize} bytes: "
                "the file is cut off, or the two do not belong together"
            )
        return _document_boundaries(index, firsts, pointers, total, self._dtype.itemsize)


def _check_joined(index: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> int:
    """Return the number of tokens after a check that the sequences are contiguous.

    Every sequence must begin where the previous one ends, as all writers store them.
    """
    total = 0
    for part in _parts(len(lengths)):
        some = lengths[part].astype(np.int64)
        ends = total + np.cumsum(some)
        wrong = np.flatnonzero((some < 0) | (pointers[part] != (ends - some) * itemsize))
        if len(wrong):
            raise StoreError(
                f"{index} is damaged: sequence {part.start + int(wrong[0])} does not begin where "
                "the one before it ends"
            )
        total = int(ends[-1])
    return total


def _document_boundaries(
    index: Path, firsts: np.ndarray, pointers: np.ndarray, total: int, itemsize: int
) -> np.ndarray:
    """Return the first token of every document, given its first sequence."""
    sequences = len(pointers)
    if (
        firsts[0] != 0
        or firsts[-1] != sequences
        or any((np.diff(firsts[part]) < 0).any() for part in _parts(len(firsts), overlap=1))
    ):
        raise StoreError(
            f"{index} is damaged: its documents do not begin at sequence 0, ascend, and end at "
            f"{sequences}"
        )
    places = np.full(len(firsts), total, np.int64)
    # documents without a sequence may end the file
    inside = int(np.searchsorted(firsts, sequences))
    places[:inside] = pointers[firsts[:inside]] // itemsize
    return places


def _parts(length: int, overlap: int = 0) -> Iterator[slice]:
    for start in range(0, length, _AT_ONCE):
        yield slice(start, start + _AT_ONCE + overlap)
