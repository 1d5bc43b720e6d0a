"""Dump of torch's flight recorder to a file, for a stuck rank."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from pathlib import Path

from lightning_ptdp.shims.torch_distributed import flight_record

__all__ = ["keep_flight_record"]

_LIMIT_S = 5.0


def keep_flight_record(rank: int) -> str:
    """Write the flight record to a file, which replaces that of an earlier run.

    The recorder is torch's and is on by default (``TORCH_FR_BUFFER_SIZE``, formerly
    ``TORCH_NCCL_TRACE_BUFFER_SIZE``). The ranks of one machine write into one folder of this user.
    The call takes a few seconds at most and never raises.

    Returns:
        The path of the file, or "" if there is no record.
    """
    path = Path(tempfile.gettempdir(), f"ptdp-flight-recorder-{os.getuid()}", f"rank_{rank}")
    done = threading.Event()

    def keep() -> None:
        with contextlib.suppress(Exception):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            part = path.with_name(f".{path.name}.{os.getpid()}")
            part.write_bytes(flight_record())
            # Atomic: another job of this user on this machine may read or write the file now.
            part.replace(path)
            done.set()

    # Not on this thread: the dump takes locks that an NCCL thread may hold.
    threading.Thread(target=keep, name="ptdp flight record", daemon=True).start()
    return str(path) if done.wait(_LIMIT_S) else ""
