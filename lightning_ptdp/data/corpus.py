"""Reader of text from files, folders and JSON lines, one document at a time.

The order of documents is always the same. Without a source, the text is the standard library of the
installed Python, which every machine has: about 9 MB, read in place.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from lightning_ptdp.base.errors import listed
from lightning_ptdp.base.option_types import Size, check_types, nearest
from lightning_ptdp.base.untrusted import reason
from lightning_ptdp.checkpoint.local_copies import local_copy
from lightning_ptdp.data.data_error import CorpusError, reading
from lightning_ptdp.data.file_pieces import CorpusFile, FilePiece, cut_lines, cut_text, parse_row

Source: TypeAlias = str | Path | Sequence[str | Path] | None
Undecodable: TypeAlias = Literal["replace", "skip", "error"]

DEFAULT_SUFFIXES = (
    ".txt",
    ".text",
    ".md",
    ".rst",
    ".tex",
    ".jsonl",
    ".ndjson",
    ".py",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".cu",
    ".rs",
    ".go",
    ".java",
    ".js",
    ".ts",
    ".jl",
    ".lua",
    ".sh",
)
JSON_LINES = (".jsonl", ".ndjson")
_NOT_TEXT = (".gz", ".bz2", ".xz", ".zst", ".zip", ".parquet", ".arrow")
_NOT_LIBRARY = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "encodings",
    "pydoc_data",
    "idlelib",
    "__pycache__",
}
_MAX_LISTED = 5
_DECODED_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class Document:
    """One text and its origin.

    The name is the relative path of the file, with ``:line`` for JSON lines and ``#number`` in a
    big text file.
    """

    name: str
    text: str


@dataclass
class ReadReport:
    """Statistics of one pass over the corpus, filled while the documents are read."""

    documents: int = 0
    undecodable: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Return one line for the log, empty if every text was UTF-8."""
        if not self.undecodable:
            return ""
        names = listed(self.undecodable, _MAX_LISTED)
        return f"{len(self.undecodable)} texts are not UTF-8: {names}"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A source of documents.

    Args:
        source: A file, a folder (searched recursively), or several of them. None selects the
            sources of the standard library. Files that end in ``.jsonl`` or ``.ndjson`` hold one
            document per line. Every other file is one document, or several if it is bigger than
            ``document_bytes``.
        suffixes: File name endings to read from a folder. Hidden files are skipped. A file named in
            ``source`` is always read.
        text_field: Key of the text in the object of a JSON line.
        undecodable: Treatment of text that is not UTF-8: ``"replace"`` the bad bytes by U+FFFD,
            ``"skip"`` the document, or raise an ``"error"``.
        document_bytes: Approximate size of the documents into which a bigger text file is cut,
            between lines.

    Raises:
        CorpusError: From ``files`` and ``documents``: a path is missing, unreadable, or holds no
            text.
    """

    source: Source = None
    suffixes: tuple[str, ...] = DEFAULT_SUFFIXES
    text_field: str = "text"
    undecodable: Undecodable = "replace"
    document_bytes: Size = 1 << 22

    def __post_init__(self) -> None:
        check_types(self)
        if not all(suffix.startswith(".") for suffix in self.suffixes):
            raise ValueError(
                f"suffixes={self.suffixes!r} must be a list of suffixes with their dot, such "
                "as ['.txt', '.jsonl']"
            )

    @property
    def roots(self) -> tuple[str, ...]:
        """The given paths; empty for the standard library."""
        if self.source is None:
            return ()
        paths = [self.source] if isinstance(self.source, str | Path) else list(self.source)
        if not paths or not all(str(path) for path in paths):
            raise CorpusError(
                f"source={self.source!r} has no path. Give a file or folder, or leave it out "
                "for the default text"
            )
        return tuple(str(path) for path in paths)

    def files(self) -> list[CorpusFile]:
        """Return all files in reading order, after a check that each exists and can be opened."""
        if self.source is None:
            files = list(_standard_library())
        else:
            files = [file for root in self.roots for file in list_files(root, self.suffixes)]
        for file in files:
            if not os.access(file.path, os.R_OK):
                raise CorpusError(f"source file {file.path} cannot be read: permission denied")
            self._check_text(file.path, is_named=str(file.path) in self.roots)
        if not sum(file.size for file in files):
            raise CorpusError(f"source={self.source!r}: all {len(files)} files are empty")
        return files

    def _check_text(self, path: Path, *, is_named: bool) -> None:
        """Check that a file is text, and not a list of rows that would become one document.

        The latter is checked for files that ``source`` names. Those in its folders have a suffix
        that the user wants to be read as text.
        """
        suffix = path.suffix.lower()
        if suffix in _NOT_TEXT:
            raise CorpusError(
                f"source file {path} is not text. Unpack it, or convert it to JSON lines (.jsonl)"
            )
        if suffix == ".json" and is_named:
            with open(path, "rb") as stream:
                start = stream.read(_DECODED_AT_ONCE).decode("utf-8-sig", errors="replace")
            field = re.escape(self.text_field)
            if re.match(r"\s*\[\s*\{", start) and re.search(rf'"{field}"\s*:', start):
                raise CorpusError(
                    f"source file {path} would be read as one text, but has rows with a field "
                    f"{self.text_field!r}. Write one row per line, into a file ending in .jsonl"
                )

    def documents(self, report: ReadReport | None = None) -> Iterator[Document]:
        """Yield every document that has text, and fill ``report`` during the pass."""
        return self.read(self.pieces(self.files()), ReadReport() if report is None else report)

    def pieces(self, files: Iterable[CorpusFile]) -> Iterator[FilePiece]:
        """Cut the files into pieces that can be read separately."""
        for file in files:
            cut = cut_lines if file.path.suffix.lower() in JSON_LINES else cut_text
            with reading(f"source file {file.path}", CorpusError):
                yield from cut(file, self.document_bytes)

    def read(self, pieces: Iterable[FilePiece], report: ReadReport) -> Iterator[Document]:
        """Yield the documents of pieces, and fill ``report``."""
        for piece in pieces:
            with reading(f"source file {piece.file.path}", CorpusError):
                data = piece.read()
            documents = self._text_document if piece.line is None else self._json_lines
            for document in documents(piece, data, report):
                report.documents += 1
                yield document

    def _text_document(
        self, piece: FilePiece, data: bytes, report: ReadReport
    ) -> Iterator[Document]:
        text = self._decode(data, piece.name, report, piece.start) or ""
        if piece.start == 0:
            text = text.removeprefix("\ufeff")
        if text:
            yield Document(piece.name, text)

    def _json_lines(self, piece: FilePiece, data: bytes, report: ReadReport) -> Iterator[Document]:
        for number, line in enumerate(io.BytesIO(data), start=piece.line or 1):
            name = f"{piece.file.name}:{number}"
            raw = self._decode(line, name, report)
            if not raw or not raw.strip("\ufeff \t\r\n"):
                continue
            text = self._field(raw.lstrip("\ufeff"), f"{piece.file.path}:{number}")
            # JSON can contain half a surrogate pair, which UTF-8 cannot encode.
            text = self._decode(text.encode("utf-8", "surrogatepass"), name, report) or ""
            if text:
                yield Document(name, text)

    def _field(self, line: str, origin: str) -> str:
        try:
            row = parse_row(line.encode())
        except ValueError as error:
            raise CorpusError(f"{origin}: {reason(error)}") from error
        if self.text_field not in row:
            raise CorpusError(
                f"{origin}: there is no field text_field={self.text_field!r}; the line has "
                f"{sorted(row)}"
            )
        text = row[self.text_field]
        if not isinstance(text, str):
            raise CorpusError(
                f"{origin}: field {self.text_field!r} is {type(text).__name__}, but must be a "
                "string"
            )
        return text

    def _decode(self, data: bytes, name: str, report: ReadReport, offset: int = 0) -> str | None:
        try:
            return _utf8(data, "strict")
        except UnicodeDecodeError as error:
            if self.undecodable == "error":
                raise CorpusError(
                    f"{name}: not UTF-8 at byte {offset + error.start}. Convert it, or set "
                    "undecodable to 'replace' or 'skip'"
                ) from error
            report.undecodable.append(name)
            return _utf8(data, "replace") if self.undecodable == "replace" else None


def _utf8(data: bytes, errors: str) -> str:
    """Decode UTF-8 in slices; equivalent to ``data.decode("utf-8", errors)``.

    Decoding megabytes at once grows and shrinks the result. glibc does not reuse the memory that
    this frees: up to 1.5 MB for each text of 4 MB, without limit.
    """
    if len(data) <= _DECODED_AT_ONCE:
        return data.decode("utf-8", errors)
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    starts = range(0, len(data), _DECODED_AT_ONCE)
    try:
        return "".join(
            [
                decoder.decode(data[start : start + _DECODED_AT_ONCE], start == starts[-1])
                for start in starts
            ]
        )
    except UnicodeDecodeError:
        return data.decode("utf-8", errors)  # raises with the position in all of the data


def list_files(source: str | Path, suffixes: tuple[str, ...]) -> list[CorpusFile]:
    """Return a file, or the files of a folder with these suffixes, in order of their names.

    Files at an address are fetched to this node.

    Raises:
        CorpusError: There is none.
    """
    root = local_copy(source, [f"*{suffix}" for suffix in suffixes])
    if not root.exists():
        siblings = os.listdir(root.parent) if root.parent.is_dir() else []
        raise CorpusError(f"source path {root} does not exist{nearest(root.name, siblings)}")
    if root.is_file():
        return [CorpusFile(root.name, root, root.stat().st_size)]
    if not root.is_dir():
        raise CorpusError(f"source path {root} is neither a file nor a folder")
    endings = tuple(suffix.lower() for suffix in suffixes)
    label = root.resolve().name
    files = [file for file in _walk(root, label, set()) if file.name.lower().endswith(endings)]
    if not files:
        raise CorpusError(
            f"source folder {root} has no file with the suffix {', '.join(suffixes)}. Set "
            "suffixes to those of its files"
        )
    return files


def _standard_library() -> list[CorpusFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (
        [file for file in _walk(root, "stdlib", _NOT_LIBRARY) if file.name.endswith(".py")]
        if root.is_dir()
        else []
    )
    if not files:
        raise CorpusError(
            f"this Python has no sources of its standard library in {root}. Set source"
        )
    return files


def _walk(root: Path, label: str, excluded: set[str]) -> list[CorpusFile]:
    def unreadable(error: OSError) -> None:
        raise CorpusError(
            f"source folder {error.filename} cannot be read: {error.strerror}"
        ) from error

    files = []
    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if name not in excluded and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                files.append(
                    CorpusFile(
                        f"{label}/{path.relative_to(root).as_posix()}", path, path.stat().st_size
                    )
                )
    return sorted(files, key=lambda file: file.name)
