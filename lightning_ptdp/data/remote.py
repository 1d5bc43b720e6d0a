"""Copies of prepared folders in remote stores.

litdata's downloaders transfer the files (``s3://``, ``gs://``, ``azure://``, ``hf://``, …). The
whole folder is copied before training, file by file, and checked against its manifest. Training
therefore reads only checked data, and a rank never waits for a network.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_ptdp.base.untrusted import MOST_BYTES, inside, reason, regular_size
from lightning_ptdp.data.data_error import StoreError
from lightning_ptdp.data.manifest import (
    MANIFEST_FILE,
    FileRecord,
    Manifest,
    check_file,
    verify_store,
)
from lightning_ptdp.data.work_folder import work_folder

if TYPE_CHECKING:  # imported on first use
    from litdata.streaming.downloader import Downloader

__all__ = ["fetch"]

_LOCAL = "local:"


def fetch(remote: str, folder: str | Path, *, hashes: bool = True) -> Manifest:
    """Copy a prepared folder, or verify an existing copy.

    After an interrupted call, only the missing files are copied.

    Args:
        remote: Address of the folder in litdata's form; ``local:/path`` for a mounted store.
        folder: Folder of the copy. It appears complete or not at all.
        hashes: Compare the hashes of an existing copy, not only the sizes. The hashes of copied
            files are always compared.

    Raises:
        StoreError: A file cannot be fetched or does not match the manifest; the message names it.
    """
    output = Path(folder)
    if output.exists():
        return verify_store(output, hashes=hashes)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with work_folder(output, {"remote": remote}) as work:
            copy, incoming = work / "store", work / "incoming"
            shutil.rmtree(incoming, ignore_errors=True)
            incoming.mkdir()
            transfer = partial(
                _transfer, remote.rstrip("/"), _downloader(remote, incoming), incoming
            )
            # Fetch the manifest in every call: the store may have been repaired since.
            manifest_file = transfer(MANIFEST_FILE)
            for name, path, record in Manifest.read(incoming).paths(copy):
                if not _is_there(path, record):
                    fetched = transfer(name, record.size)
                    check_file(fetched, record, said=f"{remote}/{name}")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    fetched.replace(path)
            manifest_file.replace(copy / MANIFEST_FILE)
            manifest = verify_store(copy, hashes=False)  # the hashes were compared one by one
            copy.rename(output)
    except OSError as error:
        if output.exists():  # another process was faster
            return verify_store(output)
        raise StoreError(
            f"{output} cannot be written: {error}. Copied files are kept for the next call"
        ) from error
    return manifest


def _transfer(
    remote: str, downloader: Downloader, incoming: Path, name: str, size: int | None = None
) -> Path:
    """Fetch a file into a folder of its own, and return its path there.

    Its name there does not depend on the store. The size is checked before the transfer if the
    store is mounted: it must be ``size``, or small if ``size`` is None. Other stores do not report
    sizes beforehand.
    """
    target = incoming / (MANIFEST_FILE if name == MANIFEST_FILE else "file")
    try:
        if remote.startswith(_LOCAL):
            _check_source(inside(remote.removeprefix(_LOCAL), name), size)
        # The client may raise any type; the message must name the file.
        downloader.download_file(f"{remote}/{name}", str(target))
    except Exception as error:
        raise StoreError(f"{remote}/{name} cannot be fetched: {reason(error)}") from error
    if not target.is_file():
        raise StoreError(
            f"{remote}/{name} was not fetched, perhaps because another process is fetching it. "
            "Try again"
        )
    return target


def _is_there(path: Path, record: FileRecord) -> bool:
    try:
        check_file(path, record)
    except StoreError:
        return False
    return True


def _check_source(file: Path, size: int | None) -> None:
    if not file.exists():
        return  # the client reports it
    actual = regular_size(file)
    if actual != size and (size is not None or actual > MOST_BYTES):
        raise ValueError(
            f"it has {actual} bytes, but must have "
            f"{f'at most {MOST_BYTES}' if size is None else size}"
        )


def _downloader(remote: str, folder: Path) -> Downloader:
    from litdata.streaming.downloader import get_downloader

    try:
        return get_downloader(remote, str(folder), [])
    except Exception as error:
        raise StoreError(f"{remote} cannot be opened: {error!r}") from error
