"""Checks of the machine without accelerators: cores, memory, shared memory, open files."""

from __future__ import annotations

from lightning_ptdp.doctor.check import Check, enough, warning

__all__ = ["check_cores", "check_memory", "check_open_files", "check_shared_memory"]

_GIB = 2**30
# A process with torch and Lightning imported, and the activations of a nano model.
_PROCESS_BYTES = 1 * _GIB
_SHARED_BYTES = 1 * _GIB
# A rank has open sockets to all other ranks, and open data chunks, logs and checkpoint files.
_FILES = 1024


def check_cores(*, cores: int, processes: int, accelerated: bool) -> Check:
    """Compare the cores that this process may use with the number of processes."""
    takes_turns = cores < processes and not accelerated
    found = f"{cores} for {processes} processes" + (
        ", which share the cores" if takes_turns else ""
    )
    mend = (
        "training works, but its speed says nothing about the layout; use fewer processes "
        "to measure"
    )
    return enough(not takes_turns, "CPU cores", found, mend)


def check_memory(*, available: int, total: int, limit: int | None, processes: int) -> Check:
    """Compare the free memory, within the container's limit, with the need of the processes."""
    usable = available if limit is None else min(available, limit)
    found = f"{usable / _GIB:.1f} GiB free of {total / _GIB:.1f}"
    if limit is not None and limit < total:
        found += f" (the container may use {limit / _GIB:.1f})"
    mend = (
        f"use fewer processes: {processes} need about {processes * _PROCESS_BYTES / _GIB:.0f} GiB"
    )
    return enough(usable >= processes * _PROCESS_BYTES, "memory", found, mend)


def check_shared_memory(free: int | None) -> Check:
    """Check the free bytes of /dev/shm, which data workers and NCCL use for messages.

    Args:
        free: Free bytes; None if there is no /dev/shm.
    """
    if free is None:
        return warning(
            "/dev/shm", "missing", "mount it: data workers (num_workers > 0) and NCCL need it"
        )
    mend = "data workers and NCCL may fail; in Docker: --shm-size=8g or --ipc=host"
    return enough(free >= _SHARED_BYTES, "/dev/shm", f"{free / _GIB:.2f} GiB free", mend)


def check_open_files(soft: int, hard: int) -> Check:
    """Check the soft and hard limits of open files; -1 means no limit."""
    found = f"{_limit(soft)}, can be raised to {_limit(hard)}" if soft != hard else _limit(soft)
    return enough(
        soft < 0 or soft >= _FILES, "open files", found, f"ulimit -n {hard if hard >= 0 else 65536}"
    )


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else str(value)
