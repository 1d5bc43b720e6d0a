"""Division of files into pieces and documents."""

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_ptdp.data import Corpus, ReadReport
from lightning_ptdp.data.file_pieces import CorpusFile, FilePiece, cut_lines, cut_text, grouped

TEXTS = st.lists(
    st.sampled_from(["a", "é", "\U0001f600", "\n", "bc\n", "long " * 9]), max_size=60
).map("".join)


def file_of(tmp_path, text):
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    return CorpusFile("text.txt", path, len(text.encode()))


@settings(deadline=None)
@given(text=TEXTS, size=st.integers(4, 40))
@example(text="\U0001f600" * 9, size=5)
@example(text="a\n" * 8, size=8)
@example(text="a" * 15 + "\naa", size=17)
def test_text_pieces_are_whole_characters_and_lines(tmp_path_factory, text, size):
    file = file_of(tmp_path_factory.getbasetemp(), text)
    pieces = list(cut_text(file, size))
    parts = [piece.read().decode() for piece in pieces]
    assert "".join(parts) == text
    assert all(parts) or not text
    for part in parts[:-1]:
        # A line is cut only if it is longer than a document.
        assert part.endswith("\n") or max(map(len, text.encode().split(b"\n"))) >= size - 1
        assert len(part.encode()) < 2 * size + 4
    assert [piece.number for piece in pieces] == (
        list(range(1, len(pieces) + 1)) if file.size > size else [None]
    )


@settings(deadline=None)
@given(text=TEXTS, size=st.integers(1, 40))
def test_line_pieces_record_first_line_number(tmp_path_factory, text, size):
    file = file_of(tmp_path_factory.getbasetemp(), text)
    lines = text.encode().split(b"\n")
    pieces = list(cut_lines(file, size))
    assert b"".join(piece.read() for piece in pieces) == text.encode()
    for piece in pieces:
        assert piece.read().split(b"\n")[0] == lines[piece.line - 1]


def test_groups_are_consecutive_and_near_requested_size(tmp_path):
    file = CorpusFile("x", tmp_path, 100)
    pieces = [FilePiece(file, start, start + 10) for start in range(0, 100, 10)]
    groups = list(grouped(pieces, 25))
    assert [piece for group in groups for piece in group] == pieces
    assert [len(group) for group in groups] == [3, 3, 3, 1]


def test_documents_of_large_files_keep_text_and_line_numbers(tmp_path):
    text = "".join(f"line {number} of one long file\n" for number in range(300))
    (tmp_path / "a.txt").write_text(text)
    rows = [f"row {number} " * 5 for number in range(200)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    corpus = Corpus(source=[tmp_path / "a.txt", tmp_path / "b.jsonl"], document_bytes=1024)
    report = ReadReport()
    documents = list(corpus.documents(report))
    of_text = [document for document in documents if document.name.startswith("a.txt#")]
    assert "".join(document.text for document in of_text) == text
    assert [document.name for document in of_text] == [
        f"a.txt#{number}" for number in range(1, len(of_text) + 1)
    ]
    assert len(of_text) > 5
    of_lines = [(document.name, document.text) for document in documents[len(of_text) :]]
    assert of_lines == [(f"b.jsonl:{number}", row) for number, row in enumerate(rows, start=1)]
    assert report.documents == len(documents)
