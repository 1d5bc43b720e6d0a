"""Megatron's indexed files: what is read is what was written, divided by documents; and every
damage is named."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptdp.data import IndexedFile, IndexedStream, StoreError
from lightning_ptdp.data.indexed_stream import _runs
from tests.data.indexed_files import numbered, write_indexed

VOCABULARY = 50_000


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write_indexed(tmp_path / "corpus_text_document", numbered(60))


def stream_of(prefix: Path, **changes: object) -> IndexedStream:
    given = {
        "sequence_length": 15,
        "vocabulary_size": VOCABULARY,
        "validation_fraction": 0.2,
        **changes,
    }
    return IndexedStream(prefix, **given)  # type: ignore[arg-type]


def tokens_of(stream: IndexedStream) -> list[int]:
    return stream.__getitems__(range(len(stream))).flatten().tolist()


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64", "int16"])
def test_documents_are_the_tokens_that_were_written(tmp_path: Path, dtype: str) -> None:
    documents = [[[]], *numbered(20), [[]], []]
    file = IndexedFile(write_indexed(tmp_path / "x", documents, dtype))
    assert file.tokens.dtype == dtype
    assert file.documents == len(documents)
    found = [
        file.tokens[a:b].tolist()
        for a, b in zip(file.boundaries[:-1], file.boundaries[1:], strict=True)
    ]
    assert found == [
        [token for sequence in document for token in sequence] for document in documents
    ]


def test_splits_hold_whole_documents_and_never_the_same(prefix: Path) -> None:
    documents = [
        {token for sequence in document for token in sequence} for document in numbered(60)
    ]
    total = sum(map(len, documents))
    train, validation, everything = (
        tokens_of(stream_of(prefix, split=split)) for split in ("train", "validation", "all")
    )
    for split in (train, validation):
        assert split == sorted(set(split))  # in the order of the file, none twice
    assert not set(train) & set(validation)
    assert total - 2 * 15 <= len(train) + len(validation) <= total
    assert everything == list(range(total // 16 * 16))
    assert len(validation) / total == pytest.approx(0.2, abs=0.03)
    touched = [document for document in documents if document & set(train)]
    assert not any(document & set(validation) for document in touched)
    assert tokens_of(stream_of(prefix, split="validation", split_seed=1)) != validation


def test_a_sample_is_inputs_and_labels_shifted_by_one(prefix: Path) -> None:
    stream = stream_of(prefix, split="all")
    assert stream[2]["input_ids"].tolist() == list(range(32, 47))
    assert stream[2]["labels"].tolist() == list(range(33, 48))
    assert len(stream_of(prefix, split="all", max_samples=3)) == 3
    again = pickle.loads(pickle.dumps(stream))
    assert again[5]["labels"].tolist() == stream[5]["labels"].tolist()
    with pytest.raises(IndexError):
        stream[len(stream)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=20))
def test_runs_are_the_chosen_documents(documents: list[tuple[int, bool]]) -> None:
    boundaries = np.cumsum([0, *(length for length, _ in documents)])
    starts, lengths = _runs(boundaries, np.array([chosen for _, chosen in documents]))
    found = [
        token
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        for token in range(start, start + length)
    ]
    wanted = [
        token
        for (_, chosen), a, b in zip(
            documents, boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True
        )
        if chosen
        for token in range(a, b)
    ]
    assert found == wanted


def test_other_data_have_another_fingerprint(prefix: Path, tmp_path: Path) -> None:
    base = stream_of(prefix)
    assert stream_of(prefix).fingerprint == base.fingerprint
    for changes in (
        {"split": "validation"},
        {"split_seed": 1},
        {"validation_fraction": 0.3},
        {"split": "all"},
    ):
        assert stream_of(prefix, **changes).fingerprint != base.fingerprint
    data = bytearray(prefix.with_suffix(".bin").read_bytes())
    data[len(data) // 3] ^= 1
    prefix.with_suffix(".bin").write_bytes(bytes(data))
    assert stream_of(prefix).fingerprint != base.fingerprint


def test_tokens_outside_the_vocabulary_are_named(tmp_path: Path) -> None:
    documents = [[[1, 2, 3]], [[4, 70_000, 5]], [[6] * 20]]
    prefix = write_indexed(tmp_path / "x", documents, "int32")
    with pytest.raises(
        StoreError, match=r"x\.bin: token 4 \(document 1\) is 70000, outside vocabulary_size=50000"
    ):
        IndexedFile(prefix).check_tokens(VOCABULARY)
    stream = stream_of(prefix, split="all", sequence_length=7)
    with pytest.raises(StoreError, match="70000"):
        stream[0]
    assert stream[1]["labels"].tolist() == [6] * 7
    IndexedFile(prefix).check_tokens(70_001)
    with pytest.raises(StoreError, match=r"token 1 .*is -1"):
        IndexedFile(write_indexed(tmp_path / "y", [[[5, -1]]], "int32")).check_tokens(VOCABULARY)


def test_too_few_tokens_or_documents(tmp_path: Path, prefix: Path) -> None:
    with pytest.raises(
        StoreError,
        match=r"no validation sample of sequence_length=900 .* bigger validation_fraction",
    ):
        stream_of(prefix, split="validation", sequence_length=900)
    one = write_indexed(tmp_path / "one", [[list(range(100))], [[]]])
    with pytest.raises(StoreError, match=r"1 document with tokens.*validation_prefix"):
        stream_of(one)
    assert len(stream_of(one, split="all")) == 6
    empty = write_indexed(tmp_path / "empty", [[[]], [[]]])
    with pytest.raises(StoreError, match="no all sample"):
        stream_of(empty, split="all")


def patched(path: Path, place: int, data: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[place : place + len(data)] = data
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize(
    ("suffix", "damage", "words"),
    [
        (".bin", Path.unlink, r"\.bin is missing"),
        (".idx", Path.unlink, r"\.idx is missing"),
        (
            ".bin",
            lambda path: path.write_bytes(path.read_bytes()[:-2]),
            "cut off, or the two do not belong together",
        ),
        (
            ".bin",
            lambda path: path.write_bytes(path.read_bytes() + b"xx"),
            "cut off, or the two do not belong together",
        ),
        (".idx", lambda path: path.write_bytes(path.read_bytes()[:-8]), "boundaries take"),
        (".idx", lambda path: path.write_bytes(path.read_bytes()[:20]), "does not begin with"),
        (
            ".idx",
            lambda path: path.write_bytes(path.read_bytes() + bytes(path.stat().st_size)),
            "boundaries take",
        ),
        (".idx", lambda path: patched(path, 0, b"TNTIDX"), "does not begin with"),
        (".idx", lambda path: patched(path, 9, struct.pack("<Q", 2)), "version 2"),
        (".idx", lambda path: patched(path, 17, b"\7"), "float32"),
        (".idx", lambda path: patched(path, 17, b"\x63"), "code 99"),
        (
            ".idx",
            lambda path: patched(path, 34, struct.pack("<i", 77)),
            "sequence [01] does not begin where",
        ),
        (
            ".idx",
            lambda path: patched(path, path.stat().st_size - 8, struct.pack("<q", 3)),
            "its documents do not begin at",
        ),
        (".idx", lambda path: patched(path, 18, struct.pack("<Q", 0)), "boundaries take"),
    ],
)
def test_damaged_and_foreign_files_are_named(
    prefix: Path, suffix: str, damage: object, words: str
) -> None:
    damage(prefix.with_suffix(suffix))  # type: ignore[operator]
    with pytest.raises(StoreError, match=words):
        stream_of(prefix)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sequence_length", 0),
        ("vocabulary_size", 0),
        ("validation_fraction", 0.9),
        ("split_seed", -1),
        ("max_samples", 0),
        ("split", "test"),
    ],
)
def test_bad_values_are_named(prefix: Path, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        stream_of(prefix, **{field: value})
