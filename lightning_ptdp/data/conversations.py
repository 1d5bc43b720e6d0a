"""Conversion of rows of chat and instruction data to conversations.

The ``datasets`` library reads the rows: JSON lines, Parquet, or a folder that ``save_to_disk``
wrote. ``Columns`` finds the columns that hold a conversation.
"""

from __future__ import annotations

import ast
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.base.option_types import nearest
from lightning_ptdp.base.requirements import RequirementError, import_optional
from lightning_ptdp.base.untrusted import parse_json, reason, regular_size
from lightning_ptdp.data.corpus import Corpus
from lightning_ptdp.data.data_error import CorpusError, reading

__all__ = ["Columns", "Conversation", "FaultyRow", "chat_files", "read_rows"]

Conversation = list[dict[str, Any]]
"""Messages, each a mapping with ``role`` and ``content``."""

_FORMS = (("messages",), ("prompt", "response"), ("instruction", "input", "output"))
_OPTIONAL = ("input", "system")
_ALSO = {
    "messages": ("conversations", "conversation"),
    "response": ("completion",),
    "output": ("response",),
}
"""Additional names under which a column is found."""
_SHARED = {"human": "user", "gpt": "assistant", "system": "system"}
"""Roles in data of the form {"from": ..., "value": ...}."""
_BUILDERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}
_DOCSTRINGS = 2000
_LONGEST_LINE, _LONGEST_DOCUMENT = 1 << 26, 1 << 30  # bytes
_MOST_DEPTH = 64
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_SAVED = ("state.json", "dataset_dict.json")


class FaultyRow(PTDPError, ValueError):
    """A row without a usable conversation or without anything to learn.

    The message gives the reason and the correction.
    """


@dataclass(frozen=True)
class Columns:
    """Names of the columns that hold a conversation.

    Attributes:
        names: Mapping from content to column: ``messages``; or ``prompt`` and ``response``; or
            ``instruction``, ``output`` and optionally ``input``; each with an optional ``system``.
    """

    names: Mapping[str, str]

    @classmethod
    def of(cls, present: Iterable[str], given: Mapping[str, str], *, where: str) -> Columns:
        """Complete the given mapping with columns of the usual names.

        Raises:
            CorpusError: A key is unknown or a column does not exist. The message names the nearest.
        """
        present = list(present)
        keys = list(dict.fromkeys([*(key for form in _FORMS for key in form), "system"]))
        for key, column in given.items():
            if key not in keys:
                raise CorpusError(
                    f"columns: {key!r} is none of {', '.join(keys)}{nearest(key, keys)}"
                )
            if column not in present:
                raise CorpusError(
                    f"{where} has no column {column!r} (columns.{key}){nearest(column, present)}; "
                    f"{_has(present)}"
                )
        for form in _FORMS:
            found = {
                key: name
                for key in (*form, "system")
                if (name := _find(key, present, given)) is not None
            }
            wanted = all(key in found for key in form if key not in _OPTIONAL)
            if wanted and all(key in found for key in given):
                return cls(found)
        close = (
            nearest("messages", present)
            or nearest("prompt", present)
            or nearest("instruction", present)
        )
        raise CorpusError(
            f"{where} has no column messages, nor prompt and response, nor instruction and "
            f"output{close}; {_has(present)}: name them, "
            "such as columns={prompt: question, response: answer}"
        )

    def conversation(self, row: Mapping[str, Any]) -> Conversation:
        """Return the messages of a row.

        Raises:
            FaultyRow: A column is empty or has another type.
        """
        names = self.names
        if "messages" in names:
            messages = _messages(row.get(names["messages"]), names["messages"])
        elif "prompt" in names:
            messages = [
                *_said(row.get(names["prompt"]), "user", names["prompt"]),
                *_said(row.get(names["response"]), "assistant", names["response"]),
            ]
        else:
            asked = _said(row.get(names["instruction"]), "user", names["instruction"])
            if "input" in names and row.get(names["input"]):
                asked[0]["content"] += f"\n\n{row[names['input']]}"
            messages = [*asked, *_said(row.get(names["output"]), "assistant", names["output"])]
        if "system" in names and row.get(names["system"]) and messages[0]["role"] != "system":
            messages = [*_said(row[names["system"]], "system", names["system"]), *messages]
        for number, message in enumerate(messages, start=1):
            content = message.get("content")
            if (
                message["role"] == "assistant"
                and not message.get("tool_calls")
                and not (content and str(content).strip())
            ):
                raise FaultyRow(
                    f"message {number}, an answer, is empty: fill it in or take the row out"
                )
        return messages


def chat_files(path: str | Sequence[str]) -> list[Path]:
    """Return the files of a path.

    A path names a file, a folder of files, or a folder that ``datasets`` saved, which counts as one
    file.

    Raises:
        CorpusError: There is no file, or its type is not supported.
    """
    files: list[Path] = []
    for root in [Path(path)] if isinstance(path, str) else map(Path, path):
        if not root.exists():
            near = (
                nearest(root.name, [entry.name for entry in root.parent.iterdir()])
                if root.parent.is_dir()
                else ""
            )
            raise CorpusError(f"path={root} does not exist{near}")
        if root.is_dir() and not any((root / name).exists() for name in _SAVED):
            found = sorted(file for file in root.rglob("*") if file.suffix in _BUILDERS)
            if not found:
                raise CorpusError(
                    f"path={root} is a folder without {', '.join(_BUILDERS)}, and not one that "
                    "datasets' save_to_disk wrote"
                )
            files += found
        elif root.is_file() and root.suffix not in _BUILDERS:
            raise CorpusError(
                f"path={root} ends in {root.suffix or 'nothing'!r}: name JSON lines (.jsonl) or "
                "Parquet (.parquet)"
            )
        else:
            files.append(root)
    if not files:
        raise CorpusError(f"path={path!r} names no file")
    return files


def read_rows(
    path: str | Sequence[str] | None, *, split: str = "train"
) -> Iterator[dict[str, Any]]:
    """Yield the rows in order.

    Without a path, yield questions about functions of the installed Python's standard library.

    Args:
        path: JSON lines, Parquet, a folder of them, a folder that ``save_to_disk`` of ``datasets``
            wrote, or several of them.
        split: Split to read from a saved folder with several splits.

    Raises:
        CorpusError: A file cannot be read, or its contents do not match its name.
    """
    if path is None:
        yield from islice(_docstrings(), _DOCSTRINGS)
        return
    for file in chat_files(path):
        if file.is_file() and not file.stat().st_size:
            continue  # datasets fails on an empty file
        with reading(f"path={file}", CorpusError, "copy it again"):
            _check_file(file)
        try:
            yield from _rows_of(file, split)
        except (CorpusError, RequirementError):
            raise
        except Exception as error:  # datasets and pyarrow raise many types
            raise CorpusError(f"path={file} cannot be read: {_why(file, error)}") from error


def _rows_of(file: Path, split: str) -> Iterator[dict[str, Any]]:
    datasets = import_optional("datasets")
    if file.is_dir():
        saved = datasets.load_from_disk(str(file))
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise CorpusError(
                    f"path={file} has no split {split!r}, only {', '.join(saved)}: name the "
                    "folder of one of them"
                )
            saved = saved[split]
        yield from saved
        return
    log = logging.getLogger("datasets")
    level = log.level
    log.setLevel(logging.CRITICAL)  # The error repeats what it logs about an unreadable file.
    try:
        # Streaming avoids a copy in a cache.
        yield from datasets.load_dataset(
            _BUILDERS[file.suffix], data_files=str(file), split="train", streaming=True
        )
    finally:
        log.setLevel(level)


def _check_file(file: Path) -> None:
    """Refuse files that would block the reader, fill the memory or crash the process.

    pyarrow crashes on deeply nested brackets.
    """
    if file.is_dir():
        return
    size = regular_size(file)
    if _BUILDERS.get(file.suffix) != "json" or not size:
        return
    with open(file, "rb") as stream:
        hole = _first_hole(stream.fileno(), size)
        if hole < size:
            raise ValueError(f"it is a sparse file, without content from byte {hole} on")
        stream.seek(0)
        _check_depth(stream, one_document=file.suffix == ".json")


def _first_hole(descriptor: int, size: int) -> int:
    try:
        return os.lseek(descriptor, 0, os.SEEK_HOLE)
    except OSError:  # the file system does not report holes
        return size


def _check_depth(stream: IO[bytes], *, one_document: bool) -> None:
    """Compare the nesting depth of brackets with a limit.

    Lines with few brackets are skipped, unless the document continues on the next line.
    """
    longest = _LONGEST_DOCUMENT if one_document else _LONGEST_LINE
    depth = 0
    for number, line in enumerate(iter(partial(stream.readline, longest), b""), start=1):
        if len(line) == longest:
            raise ValueError(f"line {number} has more than {longest} bytes")
        if not one_document and line.count(b"[") + line.count(b"{") <= _MOST_DEPTH:
            continue
        brackets = _STEPS[np.frombuffer(_STRING.sub(b"", line), np.uint8)]
        depths = np.cumsum(brackets, dtype=np.int64) + depth
        if depths.max(initial=0) > _MOST_DEPTH:
            raise ValueError(f"the brackets of line {number} are more than {_MOST_DEPTH} deep")
        depth = max(int(depths[-1]), 0) if one_document and len(depths) else 0


def _why(file: Path, error: Exception) -> str:
    """Return the first line that is no JSON object, or else the library's reason."""
    if file.is_file() and _BUILDERS[file.suffix] == "json":
        with open(file, "rb") as stream:
            lines = iter(partial(stream.readline, _LONGEST_LINE), b"")
            for number, line in enumerate(lines, start=1):
                if wrong := _wrong_line(line):
                    return f"line {number} {wrong}; a file of JSON lines has one object a line"
    return reason(error.__cause__ if isinstance(error.__cause__, Exception) else error)


def _wrong_line(line: bytes) -> str:
    """Return the defect of a line of a file of JSON lines, or an empty text."""
    if len(line) == _LONGEST_LINE:
        return f"has more than {_LONGEST_LINE} bytes"
    try:
        row = parse_json(line.decode().encode()) if line.strip() else {}
    except UnicodeDecodeError as error:
        return f"is not UTF-8 (byte {error.start + 1}: 0x{line[error.start]:02x})"
    except ValueError as error:
        return f"is not JSON ({reason(error)})"
    return "" if isinstance(row, dict) else f"is a {type(row).__name__}"


def _find(key: str, present: Sequence[str], given: Mapping[str, str]) -> str | None:
    if key in given:
        return given[key]
    return next((name for name in (key, *_ALSO.get(key, ())) if name in present), None)


def _has(present: Sequence[str]) -> str:
    return f"it has {', '.join(map(repr, present)) or 'none'}"


def _said(value: object, role: str, column: str) -> Conversation:
    """Return a text as one message, and a list of messages unchanged."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list):
        return _messages(value, column)
    raise FaultyRow(
        f"column {column!r} holds {'nothing' if value is None else type(value).__name__}; a text "
        "is needed"
    )


def _messages(value: object, column: str) -> Conversation:
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(message, Mapping) for message in value)
    ):
        raise FaultyRow(
            f"column {column!r} holds no list of messages, such as [{{'role': 'user', 'content': "
            f"...}}, ...]"
        )
    messages = []
    for number, message in enumerate(value, start=1):
        # Tables store None for a key that other messages have.
        said = {key: entry for key, entry in message.items() if entry is not None}
        if "from" in said and "role" not in said:
            role = said.pop("from")
            said = {"role": _SHARED.get(role, role), "content": said.pop("value", None), **said}
        if not isinstance(said.get("role"), str):
            raise FaultyRow(
                f"message {number} of column {column!r} has no role, only "
                f"{', '.join(map(str, said))}"
            )
        messages.append(said)
    return messages


def _docstrings() -> Iterator[dict[str, Any]]:
    """Yield questions about public functions and classes of the standard library.

    Each is answered by the first paragraph of the docstring.
    """
    for document in Corpus(suffixes=(".py",)).documents():
        try:
            tree = ast.parse(document.text)
        except SyntaxError:
            continue
        module = (
            document.name.removeprefix("stdlib/")
            .removesuffix(".py")
            .removesuffix("/__init__")
            .replace("/", ".")
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                text = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                if text:
                    yield {
                        "prompt": f"What does the {kind} {node.name} of {module} do?",
                        "response": text,
                    }
