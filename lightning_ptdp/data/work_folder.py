"""Hidden work folder of a preparation, which keeps finished parts for the next call.

::

    .<output>.preparing/
      key.json          from what and with which settings; for another key, all of it is thrown away
      lock              held by the process that works here
      survey.json       the division into training and validation
      tokenizer.model   (and tokenizer.json)
      parts/            tokens of finished parts, and a record of each, which is written last
      store/            what becomes the output
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lightning_ptdp.checkpoint.files import discard, new_number
from lightning_ptdp.data.data_error import CorpusError, TokenizerError


@contextlib.contextmanager
def work_folder(output: Path, key: Mapping[str, Any]) -> Iterator[Path]:
    """Provide a folder to work in.

    The folder is removed after success, and after an error (corpus or tokenizer) that makes its
    contents useless. After any other end, including a kill, the next call with the same key reuses
    its contents. If another process works in the folder, this call gets a temporary folder of its
    own.

    Args:
        output: Folder to prepare.
        key: Settings on which the work depends, in JSON's types.
    """
    shared = output.with_name(f".{output.name}.preparing")
    lock = _lock(shared)
    folder = shared if lock is not None else output.with_name(f".{output.name}.{new_number()}")
    keep = False
    try:
        folder.mkdir(exist_ok=True)
        if read_record(folder / "key.json") != key:
            _empty(folder)
            write_record(folder / "key.json", key)
        (folder / "parts").mkdir(exist_ok=True)
        yield folder
    except (CorpusError, TokenizerError):
        raise
    except BaseException:
        keep = lock is not None
        raise
    finally:
        if not keep:
            # Another process that begins meanwhile must not use a folder that is being removed.
            with contextlib.suppress(OSError):
                discard(folder)
        if lock is not None:
            lock.close()


def write_record(path: Path, values: Mapping[str, Any]) -> None:
    """Write JSON; the file appears complete or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(values), "utf-8")
    part.replace(path)


def read_record(path: Path) -> Any:
    """Return the values that ``write_record`` wrote; None if nothing is readable."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _lock(folder: Path) -> BinaryIO | None:
    """Return the open lock of the folder, or None if another process holds it.

    The lock is released when it is closed or the process ends.
    """
    while True:
        folder.mkdir(exist_ok=True)
        try:
            stream = open(folder / "lock", "wb")  # noqa: SIM115 - held while this process works
        except FileNotFoundError:
            continue  # the previous holder has finished and removed the folder
        try:
            # The lock belongs to the process, not to the open file: workers that outlive the
            # process for a moment must not hold it.
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.close()
            return None
        if _is_at(stream, folder / "lock"):
            return stream
        stream.close()


def _is_at(stream: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != "lock":
            entry.unlink()
