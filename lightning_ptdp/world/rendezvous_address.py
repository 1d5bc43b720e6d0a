"""Rendezvous addresses of the ranks, their network interfaces, and their launcher's numbers.

On one machine the ranks use the loopback interface only, regardless of the machine's name
resolution.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def rendezvous_store(
    address: str, port: int, *, keeps: bool, one_machine: bool, limit: timedelta
) -> dist.Store:
    """Return the store at ``address``; rank 0 hosts it (``keeps``), unless torchrun does.

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

    The port is bound, but nothing listens on it. Only a process that is given the number can use
    it.
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


# ---- Numbers of processes that a launcher has started, from its environment variables ------------

MPI = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_SIZE": "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_LOCAL_SIZE",
}
"""Variables of the number of processes in MPI's world -> that on this node."""
WORLD = "WORLD_SIZE"
"""Number of processes of torchrun (also in Kubeflow's jobs and under torchx) and of Ray Train."""
SLURM_TASKS = "SLURM_STEP_NUM_TASKS"
"""Number of tasks in a step of srun; not set in a batch script."""


def launched_processes(variables: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the number of processes on each node, and the number of nodes.

    The result is None if no launcher has started this process or if the nodes have different
    numbers of processes. SLURM's variables count only in a step of srun with several tasks, because
    a shell in an allocation is a step of one task.
    """
    for of_all, of_node in {WORLD: "LOCAL_WORLD_SIZE", **MPI}.items():
        world = number_in(variables, of_all)
        local = number_in(variables, of_node)
        if world and local:
            nodes = number_in(variables, "GROUP_WORLD_SIZE") or world // local
            return (local, nodes) if local * nodes == world else None
    world = number_in(variables, SLURM_TASKS)
    nodes = number_in(variables, "SLURM_STEP_NUM_NODES")
    return (world // nodes, nodes) if world > 1 and nodes and world % nodes == 0 else None


def number_in(variables: Mapping[str, str], name: str) -> int:
    """Return the number in a variable, or 0."""
    value = variables.get(name, "")
    return int(value) if value.isdecimal() else 0
