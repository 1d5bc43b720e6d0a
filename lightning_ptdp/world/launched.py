"""Numbers of processes that a launcher has started, from its environment variables."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["launched_processes"]

_OF_ALL_AND_OF_NODE = (
    # torchrun, also in Kubeflow's jobs and under torchx, and Ray Train
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "MPI_LOCALNRANKS"),
)


def launched_processes(variables: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the number of processes on each node, and the number of nodes.

    The result is None if no launcher has started this process or if the nodes have different
    numbers of processes. SLURM's variables count only in a step of srun with several tasks, because
    a shell in an allocation is a step of one task.
    """
    for of_all, of_node in _OF_ALL_AND_OF_NODE:
        world, local = _number(variables, of_all), _number(variables, of_node)
        if world and local:
            return None if world % local else (local, world // local)
    world, nodes = (_number(variables, f"SLURM_STEP_NUM_{of}") for of in ("TASKS", "NODES"))
    return (world // nodes, nodes) if world > 1 and nodes and world % nodes == 0 else None


def _number(variables: Mapping[str, str], name: str) -> int:
    value = variables.get(name, "")
    return int(value) if value.isdecimal() else 0
