"""Rendezvous addresses of the ranks, and the network interfaces on which they listen.

On one machine the ranks use the loopback interface only, regardless of the machine's name
resolution.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def meeting_store(
    address: str, port: int, *, keeps: bool, one_machine: bool, limit: timedelta
) -> dist.Store:
    """Return the store at ``address``; rank 0 ``keeps`` it, unless torchrun does.

    torch's own store listens on all interfaces, even if its address belongs to one of them.

    Raises:
        DistNetworkError: The store cannot be kept there, or cannot be reached within ``limit``.
    """
    if not (keeps and one_machine):
        return dist.TCPStore(address, port, is_master=keeps, wait_for_workers=False, timeout=limit)
    try:
        listener = socket.create_server((LOOPBACK, port), backlog=4096)
    except OSError as error:
        raise dist.DistNetworkError(
            f"cannot listen at {LOOPBACK}:{port}: {error.strerror}"
        ) from None
    return dist.TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=limit,
        master_listen_fd=listener.detach(),
    )


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free port of the loopback interface for a process that this one starts.

    The port is bound but not listened at, so that only a process that names it can take it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        yield holder.getsockname()[1]


def listen_on_loopback() -> list[str]:
    """Make gloo and NCCL listen on the loopback interface, unless the user chose one.

    Both read the interface from the environment.

    Returns:
        The variables that were set, for ``listen_anywhere``.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    chosen = [name for name in _INTERFACES if loopback is not None and name not in os.environ]
    os.environ.update(dict.fromkeys(chosen, loopback or ""))
    return chosen


def listen_anywhere(chosen: list[str]) -> None:
    """Remove the variables that ``listen_on_loopback`` has set."""
    for name in chosen:
        os.environ.pop(name, None)


def torchrun_keeps_store() -> bool:
    """Return True if torchrun's agent keeps the store.

    The agent sets this variable for its ranks.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
