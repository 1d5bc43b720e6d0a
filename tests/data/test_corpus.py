"""Corpus of text documents: sources, order and reported errors."""

import json
import os
from pathlib import Path

import pytest

from lightning_ptdp.data import Corpus, CorpusError, Document, ReadReport
from tests.errors import raises_with


def names(corpus):
    return [document.name for document in corpus.documents()]


def test_default_corpus_is_standard_library_without_tests():
    corpus = Corpus()
    found = [file.name for file in corpus.files()]
    assert "stdlib/json/decoder.py" in found
    assert len(found) > 200
    assert not [
        name
        for name in found
        if "/test/" in name or "/site-packages/" in name or "/encodings/" in name
    ]
    document = next(corpus.documents())
    assert document.name in found
    assert document.text


def test_folder_is_read_recursively_by_suffix_in_fixed_order(tmp_path):
    root = tmp_path / "root"
    for name in (
        "b.txt",
        "a/z.TXT",
        "a/b/c.md",
        "skip.bin",
        ".hidden.txt",
        ".git/x.txt",
        "empty.txt",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("" if name == "empty.txt" else name)
    assert names(Corpus(source=root)) == ["root/a/b/c.md", "root/a/z.TXT", "root/b.txt"]
    assert names(Corpus(source=str(root), suffixes=(".bin",))) == ["root/skip.bin"]


def test_listed_files_are_read_in_order_with_any_suffix(tmp_path):
    for name in ("b.anything", "a.txt"):
        (tmp_path / name).write_text(name)
    documents = list(Corpus(source=[tmp_path / "b.anything", tmp_path / "a.txt"]).documents())
    assert documents == [Document("b.anything", "b.anything"), Document("a.txt", "a.txt")]


def test_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_text("one\ufeff two", encoding="utf-8-sig")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf")
    documents = list(Corpus(source=[tmp_path / "a.txt", tmp_path / "b.txt"]).documents())
    assert documents == [Document("a.txt", "one\ufeff two")]


def test_json_line_is_one_document(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"text": "one\\ntwo"}\r\n\n   \n{"text": ""}\n{"id": 3, "text": "\\u00e9"}'
    )
    assert list(Corpus(source=file).documents()) == [
        Document("rows.jsonl:1", "one\ntwo"),
        Document("rows.jsonl:5", "é"),
    ]
    file.write_text(json.dumps({"body": "other"}))
    assert [document.text for document in Corpus(source=file, text_field="body").documents()] == [
        "other"
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": ', ["rows.jsonl:2", "not valid JSON"]),
        ('{"body": "x", "id": 1}', ["rows.jsonl:2", "text_field='text'", "body"]),
        ('{"text": 3}', ["rows.jsonl:2", "int"]),
        ('["text"]', ["rows.jsonl:2", "list"]),
    ],
)
def test_bad_json_line_is_reported(tmp_path, line, words):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "good"}\n' + line)
    with raises_with(words, CorpusError):
        list(Corpus(source=file).documents())


def test_invalid_utf8_is_replaced_skipped_or_refused(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    (tmp_path / "good.txt").write_text("café", "utf-8")
    (tmp_path / "half.jsonl").write_text(r'{"text": "half \ud800 pair"}')
    report = ReadReport()
    texts = {document.name: document.text for document in Corpus(source=tmp_path).documents(report)}
    folder = tmp_path.name
    assert texts[f"{folder}/bad.txt"] == "caf\ufffd"
    assert "half" in texts[f"{folder}/half.jsonl:1"]
    assert report.undecodable == [f"{folder}/bad.txt", f"{folder}/half.jsonl:1"]
    assert "2 texts are not UTF-8" in report.summary()
    for text in texts.values():
        text.encode("utf-8")
    skipped = list(Corpus(source=tmp_path, undecodable="skip").documents())
    assert [document.name for document in skipped] == [f"{folder}/good.txt"]
    with pytest.raises(CorpusError, match=r"bad\.txt: not UTF-8 at byte 3"):
        list(Corpus(source=tmp_path, undecodable="error").documents())


@pytest.mark.parametrize(
    "broken", [b"", b"\xe9", b"\xf0\x9f"], ids=["utf-8", "a byte", "half a character"]
)
def test_decoding_in_slices_matches_decoding_at_once(tmp_path, broken):
    file = tmp_path / "text.txt"
    for shift in range(5):  # characters of two to four bytes cross the end of a slice
        data = b"x" * ((1 << 16) - 8 + shift) + "é…😀".encode() + broken + b"x" * (1 << 17)
        file.write_bytes(data)
        assert [document.text for document in Corpus(source=file).documents()] == [
            data.decode("utf-8", "replace")
        ]
        if broken:
            with pytest.raises(CorpusError, match=rf"not UTF-8 at byte {(1 << 16) + 1 + shift}\."):
                list(Corpus(source=file, undecodable="error").documents())


def test_bad_sources_and_options_are_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "data.bin").write_text("x")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "rows.jsonl.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "rows.json").write_text('[{"text": "a"}]')
    for given, error, words in (
        ({"source": tmp_path / "no-such.txt"}, CorpusError, r"no-such\.txt does not exist"),
        (
            {"source": tmp_path / "folder", "suffixes": (".txt",)},
            CorpusError,
            r"folder .*has no file with the suffix \.txt",
        ),
        ({"source": tmp_path / "empty.txt"}, CorpusError, "empty"),
        ({"source": ""}, CorpusError, "has no path"),
        ({"source": tmp_path / "rows.jsonl.gz"}, CorpusError, "is not text. Unpack it"),
        ({"source": tmp_path / "rows.json"}, CorpusError, "Write one row per line"),
        ({"undecodable": "ignore"}, ValueError, "undecodable='ignore'"),
        ({"suffixes": ("txt",)}, ValueError, "suffixes"),
    ):
        with pytest.raises(error, match=words):
            Corpus(**given).files()


def test_unreadable_file_is_reported(tmp_path, monkeypatch):
    secret = tmp_path / "secret.txt"
    secret.write_text("x")
    allowed = os.access
    # Not with chmod: tests may run as root, which can read any file.
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != secret and allowed(path, mode)
    )
    with pytest.raises(CorpusError, match=r"secret\.txt cannot be read"):
        Corpus(source=tmp_path).files()
