"""Fast creation of an SQLite database."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def unsynchronized_if_new(path: Path | None) -> Iterator[None]:
    """Do not wait for the disk while the tables of a new database are created.

    MLflow creates them in about a hundred transactions. SQLite would wait several times in each.
    Instead, the file is written to the disk once, at the end.

    Args:
        path: File of the database. Nothing changes if it exists already, or for None.
    """
    if path is None or path.exists():
        yield
        return
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    opened: list[sqlite3.Connection] = []

    def relax(connection: object, _record: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous=OFF")
            opened.append(connection)

    event.listen(Engine, "connect", relax)
    try:
        yield
    finally:
        event.remove(Engine, "connect", relax)
        for connection in opened:
            with suppress(sqlite3.ProgrammingError):  # closed in the meantime
                connection.execute("PRAGMA synchronous=FULL")
        if path.exists():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
