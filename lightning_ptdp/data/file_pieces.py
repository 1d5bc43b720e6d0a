"""Division of files into pieces that can be read separately.

No file has to fit into memory.

A text file of more than a few megabytes becomes several documents. Document k begins with the first
line that begins at or after byte k times the size. This position is found without reading the text
before it. A JSON-lines file is cut between lines. The lines are counted on the way, so that each
keeps its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lightning_ptdp.base.untrusted import parse_json
from lightning_ptdp.checkpoint.files import sha256

_LOOK = 1 << 16


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """File of the corpus.

    ``name`` is relative to the source and therefore does not depend on the machine.
    """

    name: str
    path: Path
    size: int


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Bytes of a file: whole characters and, if it has lines, whole lines.

    Attributes:
        file: The file.
        start: First byte.
        stop: One past the last byte.
        line: Number of the first line in a JSON-lines file, from 1. None for text, where a piece is
            one document.
        number: Number of the piece in a text file that is cut, from 1. None for a file that is not
            cut.
    """

    file: CorpusFile
    start: int
    stop: int
    line: int | None = None
    number: int | None = None

    @property
    def name(self) -> str:
        """Name of the document in a piece of text."""
        return self.file.name if self.number is None else f"{self.file.name}#{self.number}"

    def read(self) -> bytes:
        """Return the bytes of the piece.

        Raises:
            OSError: The file cannot be read.
        """
        with open(self.file.path, "rb") as stream:
            stream.seek(self.start)
            return stream.read(self.stop - self.start)


def listing_digest(files: Sequence[CorpusFile]) -> str:
    """Return a hash of names and sizes, to detect a changed corpus without reading it."""
    listing = "\n".join(f"{file.size} {file.name}" for file in files)
    return sha256(listing.encode("utf-8", "surrogateescape"))


def cut_text(file: CorpusFile, size: int) -> Iterator[FilePiece]:
    """Yield one piece per document of about ``size`` bytes."""
    if file.size <= size:
        yield FilePiece(file, 0, file.size)
        return
    with open(file.path, "rb") as stream:
        start = 0
        number = 0
        for target in range(size, file.size + size, size):
            stop = file.size if target >= file.size else _cut(stream, target, size, file.size)
            if stop > start:
                number += 1
                yield FilePiece(file, start, stop, number=number)
                start = stop


def cut_lines(file: CorpusFile, size: int) -> Iterator[FilePiece]:
    """Yield pieces of about ``size`` bytes; a piece with a longer line is longer."""
    if file.size <= size:
        yield FilePiece(file, 0, file.size, line=1)
        return
    with open(file.path, "rb") as stream:
        start = 0
        line = 1
        while block := stream.read(size):
            tail = b"" if block.endswith(b"\n") else stream.readline()
            stop = start + len(block) + len(tail)
            yield FilePiece(file, start, stop, line=line)
            start = stop
            line += block.count(b"\n") + tail.count(b"\n")


def parse_row(line: bytes) -> dict[str, Any]:
    """Return the object in a line of JSON lines.

    Raises:
        ValueError: It is no object, not UTF-8, or too deep.
    """
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 (byte {error.start + 1}: 0x{line[error.start]:02x})"
        ) from error
    row = parse_json(line, most_values=len(line))
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, but is a {type(row).__name__}")
    return row


def grouped(pieces: Iterable[FilePiece], size: int) -> Iterator[tuple[FilePiece, ...]]:
    """Yield consecutive pieces in groups of about ``size`` bytes."""
    group: list[FilePiece] = []
    total = 0
    for piece in pieces:
        group.append(piece)
        total += piece.stop - piece.start
        if total >= size:
            yield tuple(group)
            group = []
            total = 0
    if group:
        yield tuple(group)


def _cut(stream: BinaryIO, target: int, size: int, end: int) -> int:
    """Return the first position in [``target``, ``target`` + ``size``) at which a line begins.

    If there is none, return ``target`` or the next character boundary. If the file ends before,
    there is nothing to cut off: return ``end``.
    """
    limit = min(target + size, end)
    stream.seek(target - 1)
    position = target - 1
    while position < limit and (block := stream.read(min(_LOOK, limit - position))):
        newline = block.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        position += len(block)
    if limit == end:
        return end
    stream.seek(target)
    # Do not cut inside a character: the bytes of a UTF-8 character after its first are 0b10xxxxxx,
    # at most three of them.
    lookahead = stream.read(4)
    default = len(lookahead) if len(lookahead) < 4 else 0  # end of the file, or not UTF-8
    return target + next(
        (index for index, byte in enumerate(lookahead) if byte & 0xC0 != 0x80), default
    )
