"""Tracking stores: addresses, checks that modify nothing, and creation of an SQLite database.

MLflow itself retries an unusable store for up to 100 seconds, and creates a database even to read
it."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import socket
import sqlite3
from glob import escape
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.base.option_types import check_writable_folder, nearest

_SCHEMES = (
    "http",
    "https",
    "sqlite",
    "postgresql",
    "mysql",
    "mssql",
    "file",
    "databricks",
    "databricks-uc",
    "uc",
)
_WITHOUT_SCHEME = ("databricks", "databricks-uc", "uc")
"""Stores with a name instead of an address. Any other address without a scheme is a folder."""
_SQLITE_MAGIC = b"SQLite format 3\0"
_SQLITE = "sqlite:///"


def sqlite_uri(path: Path) -> str:
    """Return the tracking URI of a database file, with special characters quoted."""
    return _SQLITE + quote(str(path))


def sqlite_path(tracking_uri: str) -> Path | None:
    """Return the file of a ``sqlite:///`` URI; None for any other store.

    MLflow reads ``sqlite:///relative.db`` as a relative and ``sqlite:////absolute.db`` as an
    absolute path."""
    if not tracking_uri.startswith(_SQLITE):
        return None
    quoted, _, _ = tracking_uri.removeprefix(_SQLITE).partition("?")
    return Path(unquote(quoted))


class SilentServerError(PTDPError, ValueError):
    """Error of an MLflow server that accepts connections and does not answer."""


def check_store(tracking_uri: str, *, timeout_s: float = 5.0) -> None:
    """Check that the store can work; nothing is created or changed.

    Args:
        tracking_uri: ``sqlite:///path``, ``http(s)://host:port`` or any other store of MLflow's, of
            which only the scheme is checked.
        timeout_s: Time limit in seconds for a server to accept a connection, and then to answer.

    Raises:
        SilentServerError: A server accepts the connection and does not answer.
        ValueError: MLflow has no such store, the folder or database cannot be written, the file is
            not a database, there is no server, or MLflow does not support folders.
    """
    _check_scheme(tracking_uri)
    path = sqlite_path(tracking_uri)
    if path is not None:
        _check_database(path, tracking_uri)
    elif tracking_uri.startswith(("http://", "https://")):
        _check_server(tracking_uri, timeout_s)
    elif tracking_uri.startswith("file:") or (
        not urlsplit(tracking_uri).scheme and tracking_uri not in _WITHOUT_SCHEME
    ):
        from mlflow import environment_variables

        allowed = getattr(environment_variables, "MLFLOW_ALLOW_FILE_STORE", None)
        if allowed is not None and not allowed.get():
            raise ValueError(
                f"tracking_uri={tracking_uri!r}: this version of MLflow no longer supports folders. "
                "Use sqlite:///FILE, or set the environment variable MLFLOW_ALLOW_FILE_STORE=true"
            )


def _check_database(path: Path, tracking_uri: str) -> None:
    setting = f"tracking_uri={tracking_uri!r}"
    check_writable_folder(path.absolute().parent, setting)
    if path.is_dir():
        raise ValueError(
            f"{setting}: {path} is a folder. Give a file in it, such as {path / 'mlflow.db'}"
        )
    if not path.exists():
        return
    if not os.access(path, os.R_OK | os.W_OK):
        raise ValueError(
            f"{setting}: {path} is not readable and writable. Give a database with write permission"
        )
    with path.open("rb") as file:
        start = file.read(len(_SQLITE_MAGIC))
    if start not in (b"", _SQLITE_MAGIC):
        raise ValueError(
            f"{setting}: {path} is not an SQLite database. Give another file, or move this one away"
        )


def _check_scheme(tracking_uri: str) -> None:
    scheme = urlsplit(tracking_uri).scheme
    if not scheme or scheme.partition("+")[0] == "sqlite":
        if scheme and sqlite_path(tracking_uri) is None:
            raise ValueError(f"tracking_uri={tracking_uri!r} names no file. Use sqlite:///FILE")
        return
    plugins = [plugin.name for plugin in entry_points(group="mlflow.tracking_store")]
    schemes = [*_SCHEMES, *plugins]
    if scheme.partition("+")[0] not in schemes:
        raise ValueError(
            f"tracking_uri={tracking_uri!r}: MLflow has no store "
            f"{scheme}:{nearest(scheme, schemes)} (use http://HOST:PORT, sqlite:///FILE or "
            "another of its stores, or leave tracking_uri out to log to a local file)"
        )


def _check_server(tracking_uri: str, timeout_s: float) -> None:
    parts = urlsplit(tracking_uri)
    secure = parts.scheme == "https"
    host = parts.hostname or ""
    if getproxies().keys() & {parts.scheme, "all"} and not proxy_bypass(host):
        return  # only the proxy, which MLflow's requests use, may reach the server
    try:
        port = parts.port or (443 if secure else 80)
        socket.create_connection((host, port), timeout=timeout_s).close()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tracking_uri={tracking_uri!r}: no MLflow server answers at {parts.netloc} "
            f"({error}). Start it, or leave tracking_uri out to log to a local file"
        ) from error
    connection_class = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    try:
        with contextlib.closing(connection_class(host, port, timeout=timeout_s)) as connection:
            connection.request("GET", f"{parts.path.rstrip('/')}/health")
            connection.getresponse()
    except TimeoutError as error:
        raise SilentServerError(
            f"tracking_uri={tracking_uri!r}: the server at {parts.netloc} accepts connections "
            f"but does not answer within {timeout_s:g} s. Restart it, or leave tracking_uri "
            "out to log to a local file"
        ) from error
    except (OSError, http.client.HTTPException):
        pass  # the server answered, or its handshake needs more than this one offers


# ---- Creation of an SQLite database --------------------------------------------------------------


def create_database(path: Path) -> None:
    """Create the database of ``path`` with MLflow's tables, unless the file exists.

    MLflow creates the tables in about a hundred transactions that take seconds, and cannot
    continue if a kill interrupts them. Therefore the file gets its name when it is complete. Until
    then SQLite does not wait for the disk.

    Raises:
        OSError: The disk is full.
    """
    if path.exists():
        return
    from mlflow.tracking import MlflowClient
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    new = path.with_name(f".{path.name}.new")
    for left in path.parent.glob(f"{escape(new.name)}*"):  # by a killed process, with its journal
        left.unlink()
    opened: list[sqlite3.Connection] = []

    def relax(connection: object, _record: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous=OFF")
            opened.append(connection)

    event.listen(Engine, "connect", relax)
    try:
        MlflowClient(sqlite_uri(new)).search_experiments(max_results=1)
    except Exception as error:
        if "disk is full" not in str(error):
            raise
        new.unlink()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
    finally:
        event.remove(Engine, "connect", relax)
        for connection in opened:
            with contextlib.suppress(sqlite3.ProgrammingError):  # of another thread
                connection.close()
    with new.open("rb+") as file:
        os.fsync(file.fileno())
    new.replace(path)
