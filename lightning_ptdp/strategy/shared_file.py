"""Files in memory that a process shares with the processes that it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["shared_file"]


@contextmanager
def shared_file() -> Iterator[str]:
    """Yield the path of an empty file in anonymous memory.

    Forked and spawned processes of the same user can open it. The file needs no space in
    ``/dev/shm`` or the temporary folder. It disappears with the context, or with this process."""
    descriptor = os.memfd_create("lightning-ptdp")
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
