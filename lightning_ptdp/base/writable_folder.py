"""Check of a folder before anything is written to it."""

from __future__ import annotations

import os
from pathlib import Path


def check_writable_folder(folder: Path, what: str) -> None:
    """Check that ``folder`` can be written or made.

    Args:
        folder: The folder, which need not exist.
        what: Field and value, for the message.

    Raises:
        ValueError: The nearest existing parent is a file or is not writable.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(
            f"{what}: {existing} is a file, so no folder can be created there. Give another folder"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{what}: {existing} is not writable. Give a folder with write permission")
