"""DCP's index, a pickle, read without running code that somebody may have put in it."""

from __future__ import annotations

import enum
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from lightning_ptdp.checkpoint.errors import CheckpointError

__all__ = ["INDEX_CLASSES", "read_index"]

# The classes in DCP's pickled index. `_StorageInfo` and `_MEM_FORMAT_ENCODING` are private names of torch.
INDEX_CLASSES = {
    "torch": {"Size"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath"},
}


def read_index(path: Path) -> dcp.Metadata:
    """The index in a file.

    Raises:
        CheckpointError: It names something that has no place in an index.
        Exception: Whatever pickle makes of a damaged file.
    """
    with open(path, "rb") as stream:
        index: dcp.Metadata = _IndexUnpickler(stream).load()
    return index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        known = name in INDEX_CLASSES.get(module, ())
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(f"it names {module}.{name}, which has no place in a checkpoint's index")


def _enum_member(kind: Any, name: str) -> Any:
    """What ``getattr`` may be used for: some releases of Python 3.11 pickle the member of an enumeration by it."""
    if isinstance(kind, enum.EnumMeta):
        return kind[name]
    raise CheckpointError(f"it asks for the attribute {name!r} of {kind!r}, which has no place in a checkpoint's index")
