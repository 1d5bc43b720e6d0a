"""Megatron's indexed files: tokens, splits at documents and reported damage."""

import pickle
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptdp.data import IndexedFile, StoreError, indexed_stream
from lightning_ptdp.data.token_store import ChunkMap
from tests.data.folders import flip
from tests.data.indexed_files import numbered, write_indexed

VOCABULARY = 50_000


@pytest.fixture
def prefix(tmp_path):
    return write_indexed(tmp_path / "corpus_text_document", numbered(60))


def stream_of(prefix, **changes):
    given = {
        "sequence_length": 15,
        "vocabulary_size": VOCABULARY,
        "validation_fraction": 0.2,
        **changes,
    }
    return indexed_stream(prefix, **given)


def tokens_of(stream):
    return stream.__getitems__(range(len(stream))).flatten().tolist()


def check_tokens(prefix, vocabulary_size):
    ChunkMap(IndexedFile(prefix).chunks("all", 0.1), vocabulary_size=vocabulary_size).check()


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64", "int16"])
def test_written_documents_are_read_back(tmp_path, dtype):
    documents = [[[]], *numbered(20), [[]], []]
    file = IndexedFile(write_indexed(tmp_path / "x", documents, dtype))
    assert file.documents == len(documents)
    reader = ChunkMap(file.chunks("all", 0.1), vocabulary_size=VOCABULARY)
    (tokens,) = reader
    assert tokens.dtype == dtype
    assert tokens.tolist() == list(range(file.tokens)) == reader.read(0, file.tokens).tolist()


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=2, max_size=20),
    st.floats(0.01, 0.5),
)
def test_split_ends_at_nearest_document(documents, fraction):
    with tempfile.TemporaryDirectory() as folder:
        written = [[[0] * length for length in document] for document in documents]
        file = IndexedFile(write_indexed(Path(folder, "x"), [[[]], *written, []]))
        starts = set(np.cumsum([0, *map(sum, documents)]).tolist()) - {0, file.tokens}
        if not starts:
            with pytest.raises(StoreError, match="document with tokens"):
                file.chunks("train", fraction)
            return
        (train,), (validation,) = (file.chunks(name, fraction) for name in ("train", "validation"))
        assert train.tokens + validation.tokens == file.tokens
        assert validation.offset == 2 * train.tokens
        wanted = round(file.tokens * (1 - fraction))
        assert train.tokens in starts
        assert abs(train.tokens - wanted) == min(abs(start - wanted) for start in starts)


def test_splits_are_disjoint_and_hold_whole_documents(prefix):
    total = sum(len(sequence) for document in numbered(60) for sequence in document)
    train, validation, everything = (
        tokens_of(stream_of(prefix, split=split)) for split in ("train", "validation", "all")
    )
    assert train == list(range(len(train)))
    starts = {document[0][0] for document in numbered(60) if document[0]}
    assert validation == list(range(validation[0], validation[0] + len(validation)))
    assert validation[0] in starts
    assert len(train) <= validation[0] < len(train) + 16
    assert everything == list(range(total // 16 * 16))
    assert len(validation) / total == pytest.approx(0.2, abs=0.03)


def test_labels_are_inputs_shifted_by_one(prefix):
    stream = stream_of(prefix, split="all")
    assert stream[2]["input_ids"].tolist() == list(range(32, 47))
    assert stream[2]["labels"].tolist() == list(range(33, 48))
    assert len(stream_of(prefix, split="all", max_samples=3)) == 3
    again = pickle.loads(pickle.dumps(stream))
    assert again[5]["labels"].tolist() == stream[5]["labels"].tolist()
    with pytest.raises(IndexError):
        stream[len(stream)]


def test_fingerprint_depends_on_data_and_split(prefix, tmp_path):
    base = stream_of(prefix)
    assert stream_of(prefix).fingerprint == base.fingerprint
    for changes in ({"split": "validation"}, {"validation_fraction": 0.3}, {"split": "all"}):
        assert stream_of(prefix, **changes).fingerprint != base.fingerprint
    flip(prefix.with_suffix(".bin"))
    assert stream_of(prefix).fingerprint != base.fingerprint


def test_tokens_outside_vocabulary_are_refused(tmp_path):
    documents = [[[1, 2, 3]], [[4, 70_000, 5]], [[6] * 20]]
    prefix = write_indexed(tmp_path / "x", documents, "int32")
    with pytest.raises(StoreError, match=r"x\.bin has token 70000, but vocabulary_size=50000"):
        check_tokens(prefix, VOCABULARY)
    stream = stream_of(prefix, split="all", sequence_length=7)
    with pytest.raises(StoreError, match="70000"):
        stream[0]
    assert stream[1]["labels"].tolist() == [6] * 7
    check_tokens(prefix, 70_001)
    with pytest.raises(StoreError, match=r"has token -1, but"):
        check_tokens(write_indexed(tmp_path / "y", [[[5, -1]]], "int32"), VOCABULARY)
    # An id of more than 32 bits is not truncated.
    with pytest.raises(StoreError, match=r"has token 4294967301, but"):
        stream_of(
            write_indexed(tmp_path / "z", [[[2**32 + 5] * 8]], "int64"),
            split="all",
            sequence_length=7,
        )[0]


def test_too_few_tokens_or_documents_are_refused(tmp_path, prefix):
    with pytest.raises(
        StoreError,
        match=r"no validation sample of sequence_length=900 .* greater validation_fraction",
    ):
        stream_of(prefix, split="validation", sequence_length=900)
    one = write_indexed(tmp_path / "one", [[list(range(100))], [[]]])
    with pytest.raises(StoreError, match=r"1 document with tokens.*validation_prefix"):
        stream_of(one)
    assert len(stream_of(one, split="all")) == 6
    empty = write_indexed(tmp_path / "empty", [[[]], [[]]])
    with pytest.raises(StoreError, match="no all sample"):
        stream_of(empty, split="all")


def patched(path, place, data):
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
            "truncated, or the two files do not belong together",
        ),
        (
            ".bin",
            lambda path: path.write_bytes(path.read_bytes() + b"xx"),
            "truncated, or the two files do not belong together",
        ),
        (".idx", lambda path: path.write_bytes(path.read_bytes()[:-8]), "boundaries need"),
        (".idx", lambda path: path.write_bytes(path.read_bytes()[:20]), "does not begin with"),
        (
            ".idx",
            lambda path: path.write_bytes(path.read_bytes() + bytes(path.stat().st_size)),
            "boundaries need",
        ),
        (".idx", lambda path: patched(path, 0, b"TNTIDX"), "does not begin with"),
        (".idx", lambda path: patched(path, 9, struct.pack("<Q", 2)), "version 2"),
        (".idx", lambda path: patched(path, 17, b"\7"), "float32"),
        (".idx", lambda path: patched(path, 17, b"\x63"), "code 99"),
        (
            ".idx",
            lambda path: patched(path, 34, struct.pack("<i", 77)),
            "sequence [01] does not begin at",
        ),
        (
            ".idx",
            lambda path: patched(path, path.stat().st_size - 8, struct.pack("<q", 3)),
            "its documents do not begin at",
        ),
        (".idx", lambda path: patched(path, 18, struct.pack("<Q", 0)), "boundaries need"),
    ],
)
def test_damaged_and_foreign_files_are_refused(prefix, suffix, damage, words):
    damage(prefix.with_suffix(suffix))
    with pytest.raises(StoreError, match=words):
        stream_of(prefix)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sequence_length", 0),
        ("vocabulary_size", 0),
        ("validation_fraction", 0.9),
        ("max_samples", 0),
        ("split", "test"),
    ],
)
def test_bad_options_are_refused(prefix, field, value):
    with pytest.raises(ValueError, match=field):
        stream_of(prefix, **{field: value})
