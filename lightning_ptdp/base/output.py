"""Text output: aligned tables, and streams that never end a program.

After a closed pipe or a lost terminal, output is discarded.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TextIO


class _Survivor(io.RawIOBase):
    """A file descriptor that discards all writes once one has failed.

    That includes writes of C++ code and of child processes.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # Another program, such as ssh, has made the terminal non-blocking.
            ready = select.poll()
            ready.register(self._descriptor, select.POLLOUT)
            ready.poll()
            return self.write(data)
        except OSError:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self._descriptor)
            os.close(devnull)
            return len(data)


def survive_closed_output() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams that survive write errors.

    They survive a closed pipe, a lost terminal and a full disk. Characters that their encoding
    lacks are written as "?". Streams that a program or a test has already replaced are left alone.
    """
    if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
        sys.stdout = _surviving(sys.__stdout__, is_error=False)
    if sys.__stderr__ is not None and sys.stderr is sys.__stderr__:
        sys.stderr = _surviving(sys.__stderr__, is_error=True)


def say(text: str) -> None:
    """Print ``text`` to standard output, if it is still readable there."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        print(text.encode("ascii", "replace").decode("ascii"), flush=True)
    except OSError:
        pass


def _surviving(stream: TextIO, *, is_error: bool) -> TextIO:
    with contextlib.suppress(OSError):
        stream.flush()
    raw = _Survivor(stream.fileno())
    is_interactive = raw.isatty()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="replace",
        line_buffering=is_interactive or is_error,
    )


# ---- Text tables with aligned columns ------------------------------------------------------------


def titled_columns(rows: Sequence[Mapping[str, str]], *, words: Collection[int] = ()) -> str:
    """Return ``columns`` of rows that map the titles of the columns to cells."""
    return columns([list(rows[0]), *(list(row.values()) for row in rows)], words=words)


def columns(rows: Sequence[Sequence[str]], *, words: Collection[int] = ()) -> str:
    """Return rows with aligned columns.

    The columns with a number in ``words`` are aligned left. All other columns, which hold numbers,
    are aligned right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.ljust(width) if i in words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
