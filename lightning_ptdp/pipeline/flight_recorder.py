"""Dump of torch's flight recorder of a stuck rank, in a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from pathlib import Path

from lightning_ptdp.shims.torch import flight_record

__all__ = ["keep_flight_record"]

_LIMIT_S = 5.0


def keep_flight_record(rank: int) -> str:
    """Write it, over what an earlier run left there; its path, or "" where there is none. Takes
    some seconds at most and never raises.

    The recorder is torch's, on by default (``TORCH_FR_BUFFER_SIZE``, before
    ``TORCH_NCCL_TRACE_BUFFER_SIZE``); ranks of one machine write into one folder of this user."""
    path = Path(tempfile.gettempdir(), f"ptdp-flight-recorder-{os.getuid()}", f"rank_{rank}")
    done = threading.Event()

    def keep() -> None:
        with contextlib.suppress(Exception):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            part = path.with_name(f".{path.name}.{os.getpid()}")
            part.write_bytes(flight_record())
            part.replace(
                path
            )  # another job of this user on this machine may be read, or write, at this moment
            done.set()

    # It takes locks that a thread of NCCL's may hold.
    threading.Thread(target=keep, name="ptdp flight record", daemon=True).start()
    return str(path) if done.wait(_LIMIT_S) else ""
