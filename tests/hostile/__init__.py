"""Hostile input files, with generators of cases for every kind of file that the package reads."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """A hostile file or folder, and the call by which a user reads it.

    ``read`` must raise a ``ValueError`` of the package (``CheckpointError`` …) that names the file,
    or succeed without harm.

    Attributes:
        name: Unique name, such as ``"checkpoint/tensors/shape/huge/verify"``.
        write: Writes the files into an empty folder.
        read: Reads these files as a user would, and writes only below the folder's ``out``.
        harmless: True if the case need not be refused, because its content is odd but valid.
    """

    name: str
    write: Callable[[Path], None]
    read: Callable[[Path], None]
    harmless: bool = False
