"""Common base of the data modules that prepare a folder, or copy one from a store."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from lightning_ptdp.base.untrusted import MOST_BYTES, inside, reason, regular_size
from lightning_ptdp.checkpoint.remote_path import RemotePath, check_address, is_url
from lightning_ptdp.data.data_error import StoreError
from lightning_ptdp.data.manifest import (
    MANIFEST_FILE,
    FileRecord,
    Manifest,
    check_file,
    verify_store,
)
from lightning_ptdp.data.preparation_work import work_folder
from lightning_ptdp.data.prepare import Preparation, check_prepare, prepare
from lightning_ptdp.data.stream_datamodule import StreamDataModule


class PreparedDataModule(StreamDataModule):
    """Batches of a folder that the first training process prepares or copies.

    Args:
        prepare_config: Configuration of the preparation.
        remote: Address of a prepared folder to copy instead.
        verify_hashes: Compare the hash of every file before training, not only its size.
        kwargs: Arguments of ``StreamDataModule``.
    """

    def __init__(
        self,
        *,
        prepare_config: Preparation,
        remote: str | None = None,
        verify_hashes: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.prepare_config = prepare_config
        self.data_dir = Path(prepare_config.output)
        self.remote = remote
        self.verify_hashes = verify_hashes

    def check(self, *, num_replicas: int = 1) -> None:
        """Check source and folder before a process is started; write nothing.

        If the data are already prepared, check also that they hold the samples of a step of
        ``num_replicas`` replicas.

        Raises:
            DataError: See ``check_prepare`` and ``TokenLoader``.
            ValueError: The batch sizes do not divide for this number of replicas.
        """
        self.batch_plans(num_replicas=num_replicas)
        if self.remote is not None:
            available = self.data_dir.exists()
            if not available:
                check_address(f"{self.remote.rstrip('/')}/{MANIFEST_FILE}")
        else:
            available = check_prepare(self.prepare_config, hashes=self.verify_hashes) is not None
        if available:
            super().check(num_replicas=num_replicas)

    def prepare_data(self) -> None:
        """Prepare or copy ``data_dir``; Lightning calls this in one process per node.

        Raises:
            DataError: See ``prepare`` and ``fetch``.
        """
        if self.remote is not None:
            fetch(self.remote, self.data_dir, hashes=self.verify_hashes)
        else:
            prepare(self.prepare_config, hashes=self.verify_hashes)

    def setup(self, stage: str | None = None) -> None:
        """Check in every process that ``data_dir`` matches its manifest.

        Raises:
            DataError: It does not match.
        """
        verify_store(self.data_dir, hashes=False)

    def _places(self) -> list[str]:
        return [str(self.data_dir)]

    def _text(self) -> list[str]:
        return Manifest.read(self.data_dir).corpus.source


_LOCAL = "local:"


# ---- Copies of prepared folders in remote stores -------------------------------------------------
#
# The whole folder is copied before training, file by file, and checked against its manifest. Training
# therefore reads only checked data, and a rank never waits for a network.


def fetch(remote: str, folder: str | Path, *, hashes: bool = True) -> Manifest:
    """Copy a prepared folder, or verify an existing copy.

    After an interrupted call, only the missing files are copied.

    Args:
        remote: Address of the folder; a path, or ``local:/path``, for a mounted store.
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
            transfer = partial(_transfer, remote.rstrip("/"), incoming)
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


def _transfer(remote: str, incoming: Path, name: str, size: int | None = None) -> Path:
    """Fetch a file into a folder of its own, and return its path there.

    Its name there does not depend on the store. The size is checked before the transfer: it must
    be ``size``, or small if ``size`` is None.
    """
    target = incoming / (MANIFEST_FILE if name == MANIFEST_FILE else "file")
    try:
        if is_url(remote):
            source = RemotePath(f"{remote}/{name}")
            _check_size(source.size(), size)
            target.write_bytes(source.read_bytes())
        else:
            file = inside(remote.removeprefix(_LOCAL), name)
            _check_size(regular_size(file), size)
            shutil.copyfile(file, target)
    except (OSError, ValueError) as error:
        raise StoreError(f"{remote}/{name} cannot be fetched: {reason(error)}") from error
    return target


def _is_there(path: Path, record: FileRecord) -> bool:
    try:
        check_file(path, record)
    except StoreError:
        return False
    return True


def _check_size(actual: int, size: int | None) -> None:
    if actual != size and (size is not None or actual > MOST_BYTES):
        raise ValueError(
            f"it has {actual} bytes, but must have "
            f"{f'at most {MOST_BYTES}' if size is None else size}"
        )
