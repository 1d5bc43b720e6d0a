"""Numbers of processes that a launcher has started, from its environment variables."""

from __future__ import annotations

from collections.abc import Mapping

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
