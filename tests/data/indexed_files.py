"""Byte-level writer of Megatron's indexed format, independent of the reader under test."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}


def write_indexed(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16"
) -> Path:
    """Write documents of token sequences as ``prefix.bin`` and ``prefix.idx``."""
    sequences = [np.asarray(sequence, dtype) for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    firsts = np.cumsum([0, *(len(document) for document in documents)])
    prefix.with_suffix(".bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, CODES[dtype], len(lengths), len(firsts))
        + np.array(lengths, "<i4").tobytes()
        + (np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize).astype("<i8").tobytes()
        + firsts.astype("<i8").tobytes()
    )
    return prefix


def numbered(count: int, *, seed: int = 0, longest: int = 40) -> list[list[list[int]]]:
    """Return documents of consecutive, unique numbers. Some are empty or have several sequences."""
    draw = np.random.default_rng(seed)
    documents, start = [], 0
    for _ in range(count):
        sequences = []
        for length in draw.integers(0, longest, draw.integers(1, 4)).tolist():
            sequences.append(list(range(start, start + length)))
            start += length
        documents.append(sequences)
    return documents
