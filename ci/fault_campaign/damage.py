"""Damage to every file of a checkpoint, one place at a time, which must be detected."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from lightning_ptdp.checkpoint import CheckpointError, verify_checkpoint

__all__ = ["Damage", "damage_every_file"]


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Damage done to one file.

    Attributes:
        file: Name of the file.
        size: Size of the file in bytes.
        flips: Places at which a bit was flipped.
        cuts: Lengths to which the file was truncated.
        unseen: Damage that was not detected.
    """

    file: str
    size: int
    flips: int
    cuts: int
    unseen: tuple[str, ...]


def damage_every_file(
    checkpoint: Path, folder: Path, draw: random.Random, *, places: int
) -> list[Damage]:
    """Flip bits in each file, truncate it and remove it, in a copy in ``folder``.

    Bits are flipped at ``places`` random places. Truncation uses ``places`` random lengths."""
    copy = Path(shutil.copytree(checkpoint, folder / "damaged.ckpt"))
    verify_checkpoint(copy)
    found = []
    for file in sorted(copy.iterdir()):
        content = file.read_bytes()
        flips = [0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(places))]
        cuts = [0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(places))]
        unseen = [
            f"bit {place % 8} of byte {place}"
            for place in flips
            if not _noticed(copy, file, _flipped(content, place))
        ]
        unseen += [
            f"cut to {length} bytes"
            for length in cuts
            if not _noticed(copy, file, content[:length])
        ]
        file.unlink()
        unseen += [] if _noticed(copy, file, None) else ["removed"]
        file.write_bytes(content)
        found.append(
            Damage(
                file=file.name,
                size=len(content),
                flips=len(flips),
                cuts=len(cuts),
                unseen=tuple(unseen),
            )
        )
    verify_checkpoint(copy)
    return found


def _flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1 << place % 8
    return bytes(changed)


def _noticed(checkpoint: Path, file: Path, content: bytes | None) -> bool:
    if content is not None:
        file.write_bytes(content)
    try:
        verify_checkpoint(checkpoint)
    except CheckpointError:
        return True
    return False
