"""Files from elsewhere that lie: every kind that we read, each with generators of what may be wrong
with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """One hostile file, or folder of them, and how a user comes to read it.

    ``read`` is to raise a ``ValueError`` of ours (``CheckpointError`` …) that names the file, or to
    succeed without any harm.

    Attributes:
        name: Unique among all cases, such as ``"checkpoint/tensors/shape/huge/verify"``.
        write: Writes the files into an empty folder.
        read: Reads what was written there, as a user would; what it writes itself is beneath the
            folder's ``out``.
        harmless: It need not be refused: what it says is odd, and true.
    """

    name: str
    write: Callable[[Path], None]
    read: Callable[[Path], None]
    harmless: bool = False
