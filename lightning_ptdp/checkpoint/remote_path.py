"""Addresses in object storage, with the methods of ``pathlib.Path`` that checkpoints need.

``located`` turns a path or any address of fsspec (``s3://``, ``gs://``, ``hf://``, ``memory://``)
into a place. Credentials come from fsspec's own configuration alone. An object is written by one
request, so that it is complete or absent. Requests that fail are repeated, and every wait has a
limit. fsspec's file system object is looked up for every request, because its event loop must not
survive a fork, and its cached listings must not be older than the writes of other processes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch

from lightning_ptdp.base.requirements import check_url
from lightning_ptdp.base.time_limit import in_thread
from lightning_ptdp.checkpoint.save_agreement import (
    CheckpointError,
    MissingCheckpointError,
    StorageError,
)

PathLike = str | os.PathLike[str]
"""A path, or an address of object storage."""
S = TypeVar("S")
T = TypeVar("T")
_AT_ONCE = 8  # requests of one rank in flight
_CALL_S = 60.0  # limit of one request, plus the time for its bytes
_BYTES_PER_S = 1e6
_RETRY_S = 120.0  # a request that failed is repeated for this time
_PAUSE_S = 0.5  # first pause before a repetition; it doubles
_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_PERMANENT = (PermissionError, *_ABSENT, ValueError, TypeError, ImportError)
_FULL = re.compile(r"quota|storage ?full|insufficient ?(storage|space)|no space", re.IGNORECASE)
_SECRET = re.compile(r"://[^/@]*:[^/@]*@")


@dataclass(frozen=True, order=True)
class RemotePath(os.PathLike[str]):
    """An address in object storage.

    Attributes:
        url: The address, without a slash at its end.
        known_size: Size of the object, if a listing or another object has just shown it.
    """

    url: str
    known_size: int | None = field(default=None, compare=False)

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """Return the last part of the address."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """Return the suffix of the name."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """Return the address without its last part."""
        above = self.url.rpartition("/")[0]
        return self if above.endswith("/") else RemotePath(above)

    def with_suffix(self, suffix: str) -> RemotePath:
        """Return the address with another suffix."""
        return self.parent / PurePosixPath(self.name).with_suffix(suffix).name

    def resolve(self) -> RemotePath:
        """Return the address; object storage has no links."""
        return self

    def is_symlink(self) -> bool:
        """Return False; object storage has no links."""
        return False

    def mkdir(self, **_: bool) -> None:
        """Do nothing; object storage has no folders."""

    def exists(self) -> bool:
        """Return True if there is an object, or objects below the address."""
        return bool(self._info())

    def is_file(self) -> bool:
        """Return True if there is an object."""
        return self._info().get("type") == "file"

    def is_dir(self) -> bool:
        """Return True if there are objects below the address."""
        return self._info().get("type") == "directory"

    def size(self) -> int:
        """Return the size of the object in bytes.

        Raises:
            FileNotFoundError: There is no object.
        """
        info = self._info()
        if info.get("type") != "file":
            raise FileNotFoundError(errno.ENOENT, "there is no such object", self.url)
        return int(info["size"])

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the objects and prefixes directly below the address."""
        with contextlib.suppress(FileNotFoundError):
            for entry in self._ask("listing", "ls", detail=True):
                name = entry["name"].rstrip("/").rpartition("/")[2]
                # Some stores list an empty object that stands for the folder itself.
                if name != self.name or entry["type"] != "file":
                    is_file = entry["type"] == "file"
                    yield RemotePath(f"{self.url}/{name}", entry["size"] if is_file else None)

    def below(self) -> dict[str, dict[str, Any]]:
        """Return the facts of all objects below the address, by their relative paths.

        The path of an object at the address itself is "".
        """
        root = self.url.partition("://")[2] + "/"
        with contextlib.suppress(FileNotFoundError):
            found = self._ask("listing", "find", detail=True)
            return {name.partition(root)[2]: found[name] for name in found}
        return {}

    def read_bytes(self, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of the object; None: its beginning, or its end."""
        nbytes = (stop or self.known_size or 0) - (start or 0)
        # s3fs has another argument in second place
        return bytes(self._ask("reading", "cat_file", nbytes=nbytes, start=start, end=stop))

    def write_bytes(self, content: bytes | memoryview) -> None:
        """Write the object, which is then complete, or as before."""
        options = {}
        if self.url.startswith(("gs:", "gcs:")) and content[-1:] == b"\r":
            # In a single request, gcsfs 2026.10 appends "\n"; a server removes "\r\n" as one line
            # end.
            options["chunksize"] = len(content)
        self._ask("writing", "pipe_file", content, nbytes=len(content), **options)

    def remove(self) -> None:
        """Remove the object, or all objects below the address."""
        # fsspec takes "[1]" in a name as a pattern, and would remove the objects that it matches.
        exact = RemotePath(glob.escape(self.url))
        with contextlib.suppress(FileNotFoundError):
            exact._ask("removing", "rm", recursive=True)

    def unlink(self) -> None:
        """Remove the object."""
        with contextlib.suppress(FileNotFoundError):
            self._ask("removing", "rm_file")

    def check_writable(self) -> None:
        """Check that objects below the address can be written, listed and removed.

        Raises:
            StorageError: They cannot. The message names the remedy.
        """
        probe = self / f".probe-{uuid.uuid4().hex}"
        probe.write_bytes(b"")
        next(self.iterdir(), None)
        probe.unlink()

    def _info(self) -> dict[str, Any]:
        """Return facts about the object, or about the objects below; empty if there are none."""
        if self.known_size is not None:
            return {"type": "file", "size": self.known_size}
        with contextlib.suppress(FileNotFoundError):
            return self._ask("reading", "info")
        return {}

    def _ask(
        self, doing: str, method: str, *arguments: object, nbytes: int = 0, **options: object
    ) -> Any:
        """Return the result of a file system's method; repeat it after errors that may pass.

        Raises:
            FileNotFoundError: There is no such object, and it was not to be written.
            StorageError: The request failed. The message names the address and the remedy.
        """
        began, pause, tries = time.monotonic(), _PAUSE_S, 0
        while True:
            tries += 1
            try:
                call = functools.partial(_call, self.url, method, *arguments, **options)
                return in_thread(call, name="storage request").result(
                    _CALL_S + nbytes / _BYTES_PER_S
                )
            except Exception as error:
                if isinstance(error, _ABSENT) and doing != "writing":
                    raise FileNotFoundError(
                        errno.ENOENT, "there is no such object", self.url
                    ) from error
                permanent, reason = _explained(error)
                if permanent or time.monotonic() + pause > began + _RETRY_S:
                    again = "" if permanent else f" (tries: {tries})"
                    raise StorageError(f"{doing} {self} failed{again}: {reason}") from error
            time.sleep(pause)
            pause *= 2


Place = Path | RemotePath
"""A path of a mounted file system, or an address in object storage."""


def is_url(path: object) -> bool:
    """Return True for an address that is not a path of a mounted file system."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    return "://" in text.removeprefix("file://")


def located(path: PathLike) -> Place:
    """Return the place of a path, which may be given as ``file:///…``, or of an address.

    The address of a checkpoint may be that of its ``metadata.json``.

    Raises:
        RequirementError: fsspec lacks the library for such addresses.
        CheckpointError: The address contains credentials.
    """
    if isinstance(path, Path | RemotePath):
        return path
    text = os.fspath(path)
    if not is_url(text):
        return Path(text.removeprefix("file://"))
    if _SECRET.search(text):
        raise CheckpointError(
            f"the address {_SECRET.sub('://***@', text)} contains credentials, which logs, "
            "hyperparameters and checkpoints would show. Put them into fsspec's configuration or "
            "the environment (for S3, the AWS variables or profile)"
        )
    check_url(text)
    return RemotePath(text.rstrip("/").removesuffix("/metadata.json"))


def check_address(argument: object) -> None:
    """Check an argument of the Trainer's functions, if it is an address.

    Raises:
        CheckpointError: Nothing is there, or as for :func:`located`.
        RequirementError: As for :func:`located`.
    """
    if isinstance(argument, str | os.PathLike) and is_url(argument):
        place = located(argument)
        # Lightning reads from the web by itself.
        if not str(place).startswith("http") and not place.exists():
            raise MissingCheckpointError(f"{place} does not exist")


def each(
    place: Place, function: Callable[[S], T], items: Iterable[S], *, threads: int = 1
) -> list[T]:
    """Return the results of a function for all items.

    The calls run in ``threads`` threads or, in object storage, in up to eight.
    """
    listed = list(items)
    count = min(len(listed), _AT_ONCE if isinstance(place, RemotePath) else threads)
    if count < 2:
        return [function(item) for item in listed]
    # The current stream of a new thread is the default stream of the first GPU, which does not wait
    # for the streams of the caller.
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def call(item: S) -> T:
        # Without a stream, torch's context would start CUDA, after which no process can fork.
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            return function(item)

    with ThreadPoolExecutor(count, thread_name_prefix="storage") as pool:
        try:
            futures = [pool.submit(call, item) for item in listed]
        except RuntimeError:  # While Python is exiting, it starts no threads.
            return [function(item) for item in listed]
        return [future.result() for future in futures]


def _call(url: str, method: str, *arguments: object, **options: object) -> Any:
    import fsspec

    system, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    return getattr(system, method)(path, *arguments, **options)


def _explained(error: Exception) -> tuple[bool, str]:
    """Return True if a repetition cannot help, and the reason with its remedy."""
    response = getattr(error.__cause__ or error, "response", None)
    code = response.get("Error", {}).get("Code", "") if isinstance(response, dict) else ""
    text = str(getattr(error, "strerror", None) or error) or f"{type(error).__name__}, no answer"
    said = text if code in text else f"{code}: {text}"
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return True, (
            f"{said}. Check that the credentials of fsspec's configuration (for S3, of the AWS "
            "environment) may list, read, write and delete there"
        )
    if _FULL.search(said):
        return True, f"{said}. Free space there, or give another address"
    if isinstance(error, FileNotFoundError):
        return True, f"{said}. Create the bucket, or give another address"
    return isinstance(error, _PERMANENT), said
