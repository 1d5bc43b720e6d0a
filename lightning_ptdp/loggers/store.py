"""Whether a tracking store can be used, found out without touching it.

MLflow itself retries an unusable store for up to 100 seconds, and creates databases merely to look at them.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["check_store", "check_writable_folder", "sqlite_path"]

_SQLITE_MAGIC = b"SQLite format 3\0"


def sqlite_path(tracking_uri: str) -> Path | None:
    """The database file of ``sqlite:///relative.db`` or ``sqlite:////absolute.db``; None for any other store."""
    prefix = "sqlite:///"
    return Path(tracking_uri[len(prefix) :]) if tracking_uri.startswith(prefix) else None


def check_store(tracking_uri: str, *, timeout_s: float = 5.0) -> None:
    """Raise if the store cannot work; nothing is created or changed.

    Args:
        tracking_uri: ``sqlite:///path``, ``http(s)://host:port`` or anything else that MLflow takes (then not checked).
        timeout_s: How long a server may take to accept a connection, in seconds.

    Raises:
        ValueError: The folder or database cannot be written, the file is not a database, or no server answers.
    """
    path = sqlite_path(tracking_uri)
    if path is not None:
        _check_database(path, tracking_uri)
    elif tracking_uri.startswith(("http://", "https://")):
        _check_server(tracking_uri, timeout_s)


def check_writable_folder(folder: Path, what: str) -> None:
    """Raise if ``folder`` cannot be written or made; ``what`` names the field and value for the message.

    Raises:
        ValueError: The nearest existing parent is a file or is not writable.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"{what}: {existing} is a file, so no folder can be made there; give another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{what}: {existing} is not writable; give a folder that you may write to")


def _check_database(path: Path, tracking_uri: str) -> None:
    what = f"tracking_uri={tracking_uri!r}"
    check_writable_folder(path.absolute().parent, what)
    if path.is_dir():
        raise ValueError(f"{what}: {path} is a folder; name a file in it, such as {path / 'mlflow.db'}")
    if not path.exists():
        return
    if not os.access(path, os.R_OK | os.W_OK):
        raise ValueError(f"{what}: {path} is not readable and writable; give a database that you may write to")
    with path.open("rb") as file:
        start = file.read(len(_SQLITE_MAGIC))
    if start not in (b"", _SQLITE_MAGIC):
        raise ValueError(f"{what}: {path} is not an SQLite database; give another file, or move this one away")


def _check_server(tracking_uri: str, timeout_s: float) -> None:
    parts = urlsplit(tracking_uri)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=timeout_s).close()
    except OSError as error:
        raise ValueError(
            f"tracking_uri={tracking_uri!r}: no MLflow server answers at {parts.hostname}:{port} ({error}); start it, or leave "
            "tracking_uri out to log to a local file"
        ) from error
