"""Data module for Megatron-LM's indexed files, which are read in place."""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lightning_ptdp.base.option_types import Size, check_arguments, check_fraction
from lightning_ptdp.checkpoint.files import sha256
from lightning_ptdp.data.data_error import StoreError, reading
from lightning_ptdp.data.manifest import SplitName
from lightning_ptdp.data.stream import BlockStream, SampleStream
from lightning_ptdp.data.stream_datamodule import StreamDataModule
from lightning_ptdp.data.token_store import Chunk, ChunkMap


class IndexedDataModule(StreamDataModule):
    """Tokens prepared by Megatron-LM's (or NeMo's) ``preprocess_data.py``.

    The files ``PREFIX.bin`` and ``PREFIX.idx`` are read in place.

    Batches, order and resuming are those of ``TextDataModule``. Documents are joined as they are
    stored: ``--append-eod`` decided whether a token ends each of them.

    Args:
        data_prefix: Path of the files without ``.bin`` and ``.idx``.
        vocabulary_size: Number of ids of the tokenizer that made the files.
        validation_prefix: Files for validation. Default: the last documents of ``data_prefix``,
            which are then excluded from training.
        validation_fraction: Approximate fraction of the tokens in these documents.
        verify_tokens: Read all tokens once before training and compare them with
            ``vocabulary_size``. The tokens of a batch are always compared.
        kwargs: Arguments of ``StreamDataModule``: sequence_length, batch sizes, seed.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    def __init__(
        self,
        *,
        data_prefix: str,
        vocabulary_size: Size,
        validation_prefix: str | None = None,
        validation_fraction: float = 0.03,
        verify_tokens: bool = True,
        **kwargs: Any,
    ) -> None:
        check_arguments(IndexedDataModule.__init__, locals())
        super().__init__(**kwargs)
        self.save_hyperparameters()
        check_fraction("validation_fraction", validation_fraction)
        self.data_prefix = data_prefix
        self.validation_prefix = validation_prefix
        self.vocabulary_size = vocabulary_size
        self.validation_fraction = validation_fraction
        self.verify_tokens = verify_tokens

    def prepare_data(self) -> None:
        """Check the tokens; Lightning calls this in one process per node.

        Raises:
            StoreError: The files are damaged, or a token is outside the vocabulary.
        """
        for prefix in self._places() if self.verify_tokens else ():
            chunks = IndexedFile(prefix).chunks("all", self.validation_fraction)
            ChunkMap(chunks, vocabulary_size=self.vocabulary_size).check()

    def _places(self) -> list[str]:
        return [
            prefix for prefix in (self.data_prefix, self.validation_prefix) if prefix is not None
        ]

    def _stream(self, split: SplitName, max_samples: int | None = None) -> SampleStream:
        separate = self.validation_prefix is not None
        return indexed_stream(
            self._places()[-1] if split == "validation" else self.data_prefix,
            split="all" if separate else split,
            sequence_length=self.sequence_length,
            vocabulary_size=self.vocabulary_size,
            validation_fraction=self.validation_fraction,
            max_samples=max_samples,
        )


# ---- Megatron-LM's indexed dataset, read in place ------------------------------------------------
#
# ``PREFIX.bin`` holds the tokens, ``PREFIX.idx`` the beginnings of documents. A split is a run of
# whole documents, as with Megatron's ``--split``: the first documents are for training, the last
# ones for validation. It is therefore one chunk of tokens (``token_store.py``), and memory does not
# grow with the number of documents. The index, little-endian::
#
#     b"MMIDIDX\0\0"  version 1 (u64)  type of a token (u8)  sequences (u64)  document boundaries (u64)
#     tokens of every sequence (i32)  its first byte in PREFIX.bin (i64)  first sequence of every document, and the end (i64)
#
# (format of ``megatron/core/datasets/indexed_dataset.py``). A document is one sequence or several.
# No token marks the end of a document unless the writer appended one (``--append-eod``).


IndexedSplit = Literal["train", "validation", "all"]
_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_OTHER_TYPES = {6: "float64", 7: "float32"}
_AT_ONCE = 1 << 22  # Numbers per step of a check: memory must not grow with the data.
_PAGES = 64
_PAGE = 4096


class IndexedFile:
    """Documents of one pair of files.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.

    Attributes:
        prefix: Path without ``.bin`` and ``.idx``, as given.
        tokens: Number of tokens.
        documents: Number of documents.

    Raises:
        StoreError: A file is missing, has another format, is truncated, does not match the other
            file, or holds no token ids. The message names the file.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self._index = Path(f"{prefix}.idx")
        self._data = Path(f"{prefix}.bin")
        for path in (self._index, self._data):
            if not path.is_file():
                raise StoreError(
                    f"{path} is missing. Give the prefix of a pair of files, PREFIX.bin and "
                    "PREFIX.idx"
                )
        with reading(self._index, StoreError):
            self._read_index()

    def chunks(self, split: IndexedSplit, validation_fraction: float) -> tuple[Chunk, ...]:
        """Return the tokens of a split: one chunk, or none if there are no tokens.

        The split ends at the beginning of a document, the one nearest to the fraction of the
        tokens.

        Raises:
            StoreError: Fewer than two documents have tokens.
        """
        start = 0
        stop = self.tokens
        if split != "all":
            cut = self._cut(validation_fraction)
            start, stop = (0, cut) if split == "train" else (cut, stop)
        offset = start * self._dtype.itemsize
        return (Chunk(self._data, stop - start, self._dtype.str, offset),) if stop > start else ()

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

    def _cut(self, validation_fraction: float) -> int:
        """Return the first token of validation."""
        numbers = range(self.documents)
        first = bisect_right(numbers, 0, key=self._start)
        last = bisect_left(numbers, self.tokens, key=self._start) - 1
        if first > last:
            raise StoreError(
                f"{self.prefix} has {min(self.tokens, 1)} document with tokens, which cannot "
                "be split. Give a separate file for validation (validation_prefix)"
            )
        target = round(self.tokens * (1 - validation_fraction))
        right = bisect_left(numbers, target, first, last, key=self._start)
        starts = [self._start(number) for number in (max(right - 1, first), right)]
        return min(starts, key=lambda start: abs(start - target))

    def _start(self, document: int) -> int:
        """Return the first token of a document."""
        sequence = int(self._firsts[document])
        if sequence == len(self._pointers):  # documents without a sequence may end the file
            return self.tokens
        return int(self._pointers[sequence]) // self._dtype.itemsize

    def _read_index(self) -> None:
        """Read the index, and check it and the size of the data."""
        index = self._index
        data = self._data
        with open(index, "rb") as stream:
            header = stream.read(_HEADER.size)
        if not header.startswith(_MAGIC) or len(header) < _HEADER.size:
            raise StoreError(
                f"{index} is not an index in the mapped format of Megatron-LM: it does not "
                f"begin with {_MAGIC!r} and a header"
            )
        _, version, code, sequences, boundaries = _HEADER.unpack(header)
        if version != 1:
            raise StoreError(f"{index} has version {version}, but only version 1 can be read")
        if code not in _TOKEN_TYPES:
            type_name = _OTHER_TYPES.get(code, f"an unknown type (code {code})")
            raise StoreError(
                f"{index}: {data.name} has {type_name}, but token ids must be integers"
            )
        self._dtype = np.dtype(_TOKEN_TYPES[code])
        size = index.stat().st_size
        expected = _HEADER.size + 12 * sequences + 8 * boundaries
        if size != expected:
            hint = (
                "; it may be a multimodal index, which has a mode for every sequence"
                if size == expected + sequences
                else ""
            )
            raise StoreError(
                f"{index} has {size} bytes, but its {sequences} sequences and {boundaries} "
                f"boundaries need {expected}{hint}"
            )
        if not sequences or boundaries < 2:
            raise StoreError(f"{index} has no document")
        raw = np.memmap(index, np.uint8, "r", offset=_HEADER.size)
        lengths, pointers, firsts = (
            part.view(dtype)
            for part, dtype in zip(
                np.split(raw, [4 * sequences, 12 * sequences]), ("<i4", "<i8", "<i8"), strict=True
            )
        )
        total = _check_joined(index, lengths, pointers, self._dtype.itemsize)
        _check_documents(index, firsts, sequences)
        data_size = data.stat().st_size
        if data_size != total * self._dtype.itemsize:
            raise StoreError(
                f"{data} has {data_size} bytes, but {index.name} lists {total} tokens of "
                f"{self._dtype.itemsize} bytes. The file is truncated, or the two files do not "
                "belong together"
            )
        self.tokens = total
        self.documents = boundaries - 1
        self._firsts = firsts
        self._pointers = pointers


def indexed_stream(
    prefix: str | Path,
    *,
    split: IndexedSplit = "train",
    sequence_length: Size,
    vocabulary_size: Size,
    validation_fraction: float = 0.03,
    max_samples: Size | None = None,
) -> BlockStream:
    """Return the token blocks of one split; documents are joined as they are stored.

    Args:
        prefix: Path of the files without ``.bin`` and ``.idx``.
        split: ``"train"``, ``"validation"``, or ``"all"`` for every document.
        sequence_length: s, tokens of a sample.
        vocabulary_size: Number of ids; every token that is read is checked against it.
        validation_fraction: Fraction of the tokens used for validation: the last documents.
        max_samples: Use only this many blocks, from the first on.

    Raises:
        StoreError: The files are damaged or hold other data (``IndexedFile``), or the split holds
            no block of this length. While reading: a token is outside the vocabulary.
        ValueError: A number is out of range.
    """
    check_arguments(indexed_stream, locals())
    check_fraction("validation_fraction", validation_fraction)
    file = IndexedFile(prefix)
    chunks = file.chunks(split, validation_fraction)
    division = [(chunk.offset, chunk.tokens) for chunk in chunks]
    return BlockStream(
        ChunkMap(chunks, vocabulary_size=vocabulary_size, block_size=sequence_length + 1),
        split=split,
        where=prefix,
        sequence_length=sequence_length,
        max_samples=max_samples,
        fingerprint=sha256(f"{file.fingerprint()} {division}".encode()),
    )


def _check_joined(index: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> int:
    """Return the number of tokens after a check that the sequences are contiguous.

    Every sequence must begin where the previous one ends, as all writers store them.
    """
    total = 0
    for part in _parts(len(lengths)):
        sizes = lengths[part].astype(np.int64)
        ends = total + np.cumsum(sizes)
        wrong = np.flatnonzero((sizes < 0) | (pointers[part] != (ends - sizes) * itemsize))
        if len(wrong):
            raise StoreError(
                f"{index} is damaged: sequence {part.start + int(wrong[0])} does not begin at "
                "the end of the previous one"
            )
        total = int(ends[-1])
    return total


def _check_documents(index: Path, firsts: np.ndarray, sequences: int) -> None:
    """Check that the first sequences of documents ascend from the first sequence to the end."""
    if (
        firsts[0] != 0
        or firsts[-1] != sequences
        or any((np.diff(firsts[part]) < 0).any() for part in _parts(len(firsts), overlap=1))
    ):
        raise StoreError(
            f"{index} is damaged: its documents do not begin at sequence 0, ascend, and end at "
            f"sequence {sequences}"
        )


def _parts(length: int, overlap: int = 0) -> Iterator[slice]:
    for start in range(0, length, _AT_ONCE):
        yield slice(start, start + _AT_ONCE + overlap)
