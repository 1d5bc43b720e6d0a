"""Checks for processes that a launcher has started but the Trainer does not count."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["check_processes"]

_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# The first is set in a step of srun, but not in a shell in an allocation. The second is set by
# torchrun and Ray.
_OTHERS = (
    "SLURM_STEP_NUM_TASKS",
    "WORLD_SIZE",
)


def check_processes(
    environment: Any, variables: Mapping[str, str], *, devices: int, num_nodes: int
) -> None:
    """Refuse a training that each of several processes would run by itself.

    Args:
        environment: Lightning's cluster environment.
        variables: The environment's variables.
        devices: Processes per machine, as the Trainer counts them.
        num_nodes: Machines, as the Trainer counts them.

    Raises:
        ValueError: A launcher has started more processes than will join, or several machines must
            join and no address is set. The message says what would work.
    """
    if (
        num_nodes > 1
        and type(environment).__name__ == "LightningEnvironment"
        and not variables.get("MASTER_ADDR")
    ):
        raise ValueError(
            f"num_nodes={num_nodes}, but MASTER_ADDR is not set, so this machine would wait "
            "for the others at its own address. Start the training by torchrun or srun (ptdp "
            "fit --launcher writes the script), or set MASTER_ADDR, MASTER_PORT and NODE_RANK "
            "on each machine"
        )
    joins = environment is not None and environment.creates_processes_externally
    for name, count in _announced(environment, variables):
        if count < 2:
            continue
        alone = devices * num_nodes == 1
        # A process that starts the other processes runs once on each node.
        started_again = name in _MPI and not joins and count != num_nodes
        if not alone and not started_again:
            continue
        if joins:
            works = (
                f"Use Trainer(devices=..., num_nodes=...) with devices * num_nodes = {count}, or "
                "start one process"
            )
        else:
            works = (
                f"Use Trainer(devices={count}, num_nodes=1) and start it with: torchrun "
                f"--nproc-per-node {count} --no-python {shlex.join(sys.orig_argv)}"
            )
        raise ValueError(
            f"{name}={count}, but Trainer(devices={devices}, num_nodes={num_nodes}), so each "
            f"of the {count} processes would run a separate training. {works}"
        )


def _announced(environment: Any, variables: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the sources that announce a number of processes, and the number."""
    for name in (*_MPI, *_OTHERS):
        value = variables.get(name, "")
        if value.isdecimal():
            yield name, int(value)
    # SLURM's environment counts the tasks of the job, even in a shell that runs one process.
    if (
        environment is not None
        and environment.creates_processes_externally
        and not hasattr(environment, "requeue_signal")
    ):
        yield f"{type(environment).__name__}.world_size()", environment.world_size()
