"""Verification of every byte of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError
from lightning_ptdp.checkpoint.checksums import open_summed
from lightning_ptdp.checkpoint.index import check_index
from lightning_ptdp.checkpoint.metadata import (
    CheckpointMetadata,
    read_metadata,
    read_sums,
    read_verified,
)

__all__ = ["verify_checkpoint"]


def verify_checkpoint(
    path: str | os.PathLike[str], *, part: int = 0, parts: int = 1
) -> CheckpointMetadata:
    """Read a whole checkpoint and compare it with its checksums; not collective.

    Args:
        path: The checkpoint folder.
        part: Number of the share of the tensor files to read here; every rank may read one share.
        parts: Number of shares. The small files are always read.

    Returns:
        The checkpoint's metadata.

    Raises:
        CheckpointError: Files are missing or damaged. The message names all of them.
    """
    folder = Path(path)
    metadata = read_metadata(folder)
    wrong = []
    data = [name for name, entry in sorted(metadata.files.items()) if entry.sha256 is None]
    for name in [*(metadata.files.keys() - set(data)), *data[part::parts]]:
        try:
            if name in data:
                sums = read_sums(folder, metadata, name)
                with open_summed(folder / name, sums, size=metadata.files[name].size) as file:
                    file.check()
            else:
                read_verified(folder, metadata, name)
        except (CheckpointError, OSError) as error:
            wrong.append(str(error))
    if wrong:
        raise CheckpointError("; ".join(dict.fromkeys(wrong)))
    check_index(folder, metadata)
    return metadata
