"""Limits of this machine that would stop the ranks after they have started."""

from __future__ import annotations

import multiprocessing
import resource
import socket

__all__ = ["check_machine"]

_LOOPBACK = "127.0.0.1"
_LOOPBACK_S = 5.0
# Measured with torch 2.15 and gloo, recipe gpt/nano: rank 0 of 4 has 85 open files, the other ranks
# have 70. Each group connects all of its ranks with each other, so that the number grows with the
# world.
_FILES, _FILES_PER_RANK = 64, 16


def check_machine(*, world_size: int, start_method: str, accelerator: str) -> None:
    """Check that this machine lets ``world_size`` processes start and connect.

    The soft limit of open files is raised if the hard limit allows that.

    Args:
        world_size: Number of processes, all of which this process starts.
        start_method: "popen", "fork", "spawn" or "forkserver".
        accelerator: Type of the devices, "cpu" or "cuda".

    Raises:
        ValueError: The message names the limit and the command that changes it.
    """
    if accelerator == "cpu":
        _check_open_files(_FILES + _FILES_PER_RANK * world_size, world_size)
    if start_method != "popen":
        _check_semaphores(start_method)
    _check_loopback()


def _check_open_files(needed: int, world_size: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft in (unlimited, -1) or soft >= needed:
        return
    if hard != unlimited and hard < needed:
        raise ValueError(
            f"this machine allows at most {hard} open files, but each of {world_size} "
            f"processes needs up to {needed}. Raise the limit (ulimit -n {needed}, in a "
            f"container --ulimit nofile={needed}), or use fewer devices"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _check_semaphores(start_method: str) -> None:
    """Create a semaphore, as Python does for each queue between processes."""
    try:
        multiprocessing.get_context("spawn").Lock()
    except OSError as error:
        raise ValueError(
            f"start_method={start_method!r} needs semaphores, which Linux keeps in /dev/shm: "
            f"{error.strerror}. Mount it writable (mount -o remount,rw /dev/shm; in a container "
            "--tmpfs /dev/shm), or use start_method='popen'"
        ) from error


def _check_loopback() -> None:
    """Connect to this machine, as the ranks do with each other."""
    try:
        with socket.create_server((_LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_S).close()
    except OSError as error:
        raise ValueError(
            f"processes on this machine cannot connect to {_LOOPBACK}: {error.strerror or error}. "
            "Start the loopback interface (ip link set lo up), or use devices=1"
        ) from error
