"""Conversion of rows of chat and instruction data to conversations.

Rows come from JSON lines, and from what the ``datasets`` library reads: Parquet, or a folder that
its ``save_to_disk`` wrote. ``Columns`` finds the columns that hold a conversation.
"""

from __future__ import annotations

import ast
import codecs
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.base.option_types import nearest
from lightning_ptdp.base.requirements import RequirementError, import_optional
from lightning_ptdp.base.untrusted import parse_json, read_bytes, reason, regular_size
from lightning_ptdp.checkpoint.local_copies import local_copy
from lightning_ptdp.data.corpus import JSON_LINES, Corpus, list_files
from lightning_ptdp.data.data_error import CorpusError
from lightning_ptdp.data.file_pieces import parse_row

Conversation = list[dict[str, Any]]
"""Messages, each a mapping with ``role`` and ``content``."""

Rows: TypeAlias = Iterator[dict[str, Any]]
Paths: TypeAlias = str | Sequence[str] | None
"""One or several paths of data; None for the default data."""

_OPTIONAL = ("input", "system")
_ALSO = {
    "messages": ("conversations", "conversation"),
    "response": ("completion",),
    "output": ("response",),
}
"""Additional names under which a column is found."""
_SHARED = {"human": "user", "gpt": "assistant", "system": "system"}
"""Roles in data of the form {"from": ..., "value": ...}."""
_JSON = (*JSON_LINES, ".json")
_SUFFIXES = (*_JSON, ".parquet")
_DOCSTRINGS = 2000
_LONGEST_LINE = 1 << 26  # bytes
_LONGEST_LIST = 1 << 30  # bytes of a list in a .json file
_MOST_VALUES = 1 << 24  # values of such a list
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

    forms: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("messages",),
        ("prompt", "response"),
        ("instruction", "input", "output"),
    )
    """Contents that hold a conversation, the first to be preferred."""
    needed: ClassVar[str] = "messages, nor prompt and response, nor instruction and output"
    example: ClassVar[str] = "{prompt: question, response: answer}"

    @classmethod
    def of(cls, columns: Iterable[str], given: Mapping[str, str], *, where: str) -> Columns:
        """Complete the given mapping with columns of the usual names.

        Raises:
            CorpusError: A key is unknown or a column does not exist. The message names the nearest.
        """
        columns = list(columns)
        keys = list(dict.fromkeys([*(key for form in cls.forms for key in form), "system"]))
        for key, column in given.items():
            if key not in keys:
                raise CorpusError(
                    f"columns: {key!r} is not one of {', '.join(keys)}{nearest(key, keys)}"
                )
            if column not in columns:
                raise CorpusError(
                    f"{where} has no column {column!r} (columns.{key}){nearest(column, columns)}; "
                    f"{_has(columns)}"
                )
        for form in cls.forms:
            names = {
                key: name
                for key in (*form, "system")
                if (name := _find(key, columns, given)) is not None
            }
            if all(key in names for key in (*form, *given)):
                return cls(names)
        hints = (nearest(form[0], columns) for form in cls.forms)
        raise CorpusError(
            f"{where} has no column {cls.needed}{next(filter(None, hints), '')}; "
            f"{_has(columns)}. Name the columns, such as columns={cls.example}"
        )

    def content(self, row: Mapping[str, Any]) -> Any:
        """Return the messages of a row; subclasses may return other content.

        Raises:
            FaultyRow: A column is empty or has another type.
        """
        names = self.names
        if "messages" in names:
            messages = _messages(row.get(names["messages"]), names["messages"])
        elif "prompt" in names:
            messages = [
                *self.messages_in(row, "prompt", "user"),
                *self.messages_in(row, "response", "assistant"),
            ]
        else:
            question = self.messages_in(row, "instruction", "user")
            if "input" in names and row.get(names["input"]):
                _append(question, row[names["input"]], names["input"])
            messages = [*question, *self.messages_in(row, "output", "assistant")]
        return self._checked(row, messages)

    def messages_in(self, row: Mapping[str, Any], key: str, role: str) -> Conversation:
        """Return the text in a column as one message, and a list of messages unchanged."""
        column = self.names[key]
        value = row.get(column)
        if isinstance(value, str):
            return [{"role": role, "content": value}]
        if isinstance(value, list):
            return _messages(value, column)
        raise FaultyRow(
            f"column {column!r} is {'empty' if value is None else 'a ' + type(value).__name__}, "
            "but must be text"
        )

    def _checked(self, row: Mapping[str, Any], messages: Conversation) -> Conversation:
        """Return the messages after the row's system message, if it has one.

        Raises:
            FaultyRow: There is no answer, or it is empty.
        """
        column = self.names.get("system", "")
        if row.get(column) and messages[0]["role"] != "system":
            messages = [*self.messages_in(row, "system", "system"), *messages]
        roles = dict.fromkeys(str(message["role"]) for message in messages)
        if "assistant" not in roles:
            raise FaultyRow(
                "there is nothing to learn: no message has the role assistant (the roles are "
                f"{', '.join(roles)})"
            )
        for number, message in enumerate(messages, start=1):
            content = message.get("content")
            if (
                message["role"] == "assistant"
                and not message.get("tool_calls")
                and not "".join(texts_of(content)).strip()
            ):
                raise FaultyRow(
                    f"message {number}, an answer, is empty. Add its text, or remove the row"
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
    for root in map(local_copy, [path] if isinstance(path, str) else path):
        if any((root / name).exists() for name in _SAVED):
            files.append(root)
            continue
        paths = [file.path for file in list_files(root, _SUFFIXES)]
        if paths == [root] and root.suffix.lower() not in _SUFFIXES:
            raise CorpusError(
                f"path={root} has the suffix {root.suffix or ''!r}. Give JSON lines (.jsonl) "
                "or Parquet (.parquet)"
            )
        files += paths
    if not files:
        raise CorpusError(f"path={path!r} matches no file")
    return files


def read_rows(path: Paths, *, split: str = "train") -> Rows:
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
        try:
            if file.is_dir():
                yield from _saved_rows(file, split)
                continue
            size = regular_size(file)
            if file.suffix.lower() in _JSON:
                yield from _json_rows(file)
            elif size:  # datasets fails on an empty file
                yield from import_optional("datasets").load_dataset(
                    "parquet", data_files=str(file), split="train", streaming=True
                )
        except (CorpusError, RequirementError):
            raise
        except Exception as error:  # datasets and pyarrow raise many types
            cause = error.__cause__  # of datasets' errors; a plain ValueError is of this package
            exc = cause if isinstance(cause, Exception) and type(error) is not ValueError else error
            message = (exc.strerror if isinstance(exc, OSError) else None) or reason(exc)
            raise CorpusError(f"path={file} cannot be read: {message}") from error


def _saved_rows(folder: Path, split: str) -> Rows:
    datasets = import_optional("datasets")
    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise CorpusError(
                f"path={folder} has no split {split!r}, only {', '.join(saved)}. Give the "
                "folder of one of them"
            )
        saved = saved[split]
    yield from saved


def _json_rows(file: Path) -> Rows:
    """Yield the objects of JSON lines, or of a list that takes the whole of a ``.json`` file."""
    with open(file, "rb") as stream:
        start = stream.read(1 << 10).removeprefix(codecs.BOM_UTF8)
        if file.suffix.lower() == ".json" and start.lstrip().startswith(b"["):
            content = read_bytes(file, most_bytes=_LONGEST_LIST)
            for number, row in enumerate(parse_json(content, most_values=_MOST_VALUES), start=1):
                if not isinstance(row, dict):
                    raise ValueError(f"entry {number} of its list is a {type(row).__name__}")
                yield row
            return
        stream.seek(0)
        for number, line in enumerate(iter(partial(stream.readline, _LONGEST_LINE), b""), start=1):
            try:
                if len(line) == _LONGEST_LINE:
                    raise ValueError(f"more than {_LONGEST_LINE} bytes")
                row = parse_row(line) if line.strip() else None
            except ValueError as error:
                raise ValueError(
                    f"line {number}: {reason(error)}. A file of JSON lines has one object per line"
                ) from error
            if row is not None:
                yield row


def _append(messages: Conversation, text: object, column: str) -> None:
    """Append the text of the column ``input`` to the last message of the user.

    Raises:
        FaultyRow: There is none, or it is not text.
    """
    message = next((one for one in reversed(messages) if one["role"] == "user"), {})
    content = message.get("content")
    if not isinstance(content, str):
        raise FaultyRow(
            f"column {column!r} is appended to the last message of the user, which must be a text. "
            "Put its text into the messages, or remove the column"
        )
    message["content"] = f"{content}\n\n{text}"


def _find(key: str, columns: Sequence[str], given: Mapping[str, str]) -> str | None:
    if key in given:
        return given[key]
    # A row need not have the optional columns, the first rows included.
    names = (key, *_ALSO.get(key, ()))
    return next((name for name in names if name in columns or key in _OPTIONAL), None)


def _has(columns: Sequence[str]) -> str:
    return f"it has {', '.join(map(repr, columns)) or 'none'}"


def texts_of(content: object) -> list[str]:
    """Return the texts in the content of a message: a text, or a list of parts."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return [str(part["text"]) for part in parts if isinstance(part, Mapping) and part.get("text")]


def _messages(value: object, column: str) -> Conversation:
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(message, Mapping) for message in value)
    ):
        raise FaultyRow(
            f"column {column!r} must be a list of messages, such as [{{'role': 'user', "
            "'content': ...}, ...]"
        )
    messages = []
    for number, message in enumerate(value, start=1):
        # Tables store None for a key that other messages have.
        clean = {key: entry for key, entry in message.items() if entry is not None}
        if "from" in clean and "role" not in clean:
            role = clean.pop("from")
            clean = {"role": _SHARED.get(role, role), "content": clean.pop("value", None), **clean}
        if not isinstance(clean.get("role"), str):
            raise FaultyRow(
                f"message {number} of column {column!r} has no role, only "
                f"{', '.join(map(str, clean))}"
            )
        messages.append(clean)
    return messages


def _docstrings() -> Rows:
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
        for node in _statements(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                text = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                if text:
                    yield {
                        "prompt": f"What does the {kind} {node.name} of {module} do?",
                        "response": text,
                    }


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the statements of a module in the order of ``ast.walk``, without expressions.

    Most nodes are expressions, which contain no definitions.
    """
    todo: deque[ast.AST] = deque([tree])
    while todo:
        node = todo.popleft()
        yield node
        for block in ("body", "handlers", "orelse", "finalbody", "cases"):
            todo.extend(getattr(node, block, ()))
