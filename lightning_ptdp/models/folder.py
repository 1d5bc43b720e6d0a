"""Where the files of a Hugging Face model are: a folder, or a name on the hub whose files are in the cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lightning_ptdp.models.tiny import make_tiny

__all__ = ["InitialWeights", "local_folder"]

_TINY = "tiny:"


@dataclass(frozen=True)
class InitialWeights:
    """What a LightningModule's ``initial_weights()`` says the strategy to fill it with.

    Attributes:
        path: The folder, or the name on the hub.
        may_lack: Patterns of the module's names that need not be there and keep the values that are drawn (``"*.lora_*"``).
        ignores: Regular expressions found in the names of stored tensors that the model has no use for.
    """

    path: str
    may_lack: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()


def local_folder(path: str) -> Path:
    """The folder of ``path`` on this machine; of ``tiny:FOLDER`` a small model in FOLDER, made if it is not there."""
    if path.startswith(_TINY):
        folder = Path(path.removeprefix(_TINY))
        if not folder.is_dir():
            make_tiny(folder)
        return folder
    if os.path.isdir(path):
        return Path(path)
    raise ValueError(f"path={path!r} is no folder")
