"""A prepared folder in a remote store, copied to a local one by litdata's downloaders (``s3://``, ``gs://``, ``azure://``, ``hf://``, …).

The whole folder is copied before training, file by file, and checked against its manifest: nothing is read during training that was not
checked, and a rank never waits for a network.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lightning_ptdp.data.errors import DataError, StoreError
from lightning_ptdp.data.manifest import MANIFEST_FILE, Manifest, verify_store
from lightning_ptdp.data.work_folder import work_folder

__all__ = ["fetch"]


def fetch(remote: str, folder: str | Path, *, hashes: bool = True) -> Manifest:
    """Copy a prepared folder, or find that the copy is there; after an interrupted call, go on with the files that are missing.

    Args:
        remote: Address of the folder, as litdata takes it; ``local:/path`` for a mounted one.
        folder: Where the copy is, or will be: complete or not at all.
        hashes: Compare the hashes of a copy that is there already, not only the sizes. Those of what was copied are always compared.

    Raises:
        StoreError: A file cannot be fetched, or is not what the manifest says; names it.
    """
    output = Path(folder)
    if output.exists():
        return verify_store(output, hashes=hashes)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with work_folder(output, {"remote": remote}) as work:
            copy = work / "store"
            copy.mkdir(exist_ok=True)
            downloader = _downloader(remote, copy)
            _copy(downloader, remote, copy, MANIFEST_FILE)
            for name in Manifest.read(copy).files:
                _copy(downloader, remote, copy, name)
            try:
                manifest = verify_store(copy)
            except DataError:
                shutil.rmtree(copy)  # else the next call would find the damaged file
                raise
            copy.rename(output)
    except OSError as error:
        raise StoreError(f"{output} cannot be written: {error}. What was copied is kept for the next call") from error
    return manifest


def _downloader(remote: str, folder: Path) -> Any:
    from litdata.streaming.downloader import get_downloader

    try:
        return get_downloader(remote, str(folder), [])
    except Exception as error:
        raise StoreError(f"{remote} cannot be opened: {error!r}") from error


def _copy(downloader: Any, remote: str, folder: Path, name: str) -> None:
    target = folder / name
    target.parent.mkdir(exist_ok=True)
    # Whatever the store's client raises, the user needs to know which file it was.
    try:
        downloader.download_file(f"{remote.rstrip('/')}/{name}", str(target))
    except Exception as error:
        raise StoreError(f"{remote.rstrip('/')}/{name} cannot be fetched: {error!r}") from error
    target.with_name(f"{target.name}.lock").unlink(missing_ok=True)
    if not target.is_file():
        raise StoreError(f"{remote.rstrip('/')}/{name} was not fetched: another process may be fetching it, try again")
