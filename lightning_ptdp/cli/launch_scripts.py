"""Scripts that start ``ptdp fit`` on many devices: for SLURM and for torchrun. They run in this
folder, with this interpreter."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_ptdp.base.option_types import Count, Size, check_types
from lightning_ptdp.cli.command_line import options_on

__all__ = ["LaunchJob", "slurm_script", "torchrun_script"]

_SAVE_S = 120
_PORT = 29500
# SLURM job ids are unique on a cluster: two jobs on one node take different ports.
_PORT_OF_JOB = "$((20000 + SLURM_JOB_ID % 20000))"


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """Command, nodes and devices of a job.

    Attributes:
        arguments: Those of ``ptdp fit``.
        nodes: Number of machines.
        devices: Processes of a machine, one a device.
        gpus: Whether the devices are GPUs.
        cpus_per_task: Cores of a process.
        name: Of the job.
        sbatch: More options of sbatch, such as "--partition=a100".
        max_restarts: How often torchrun starts all processes again after a failure.
        rendezvous: host:port at which torchrun's nodes meet; None: ``$MASTER_ADDR:$MASTER_PORT``.
    """

    arguments: tuple[str, ...]
    nodes: Size
    devices: Size
    gpus: bool
    cpus_per_task: Size
    name: str
    sbatch: tuple[str, ...] = ()
    max_restarts: Count = 3
    rendezvous: str | None = None

    def __post_init__(self) -> None:
        check_types(self)


def slurm_script(job: LaunchJob) -> str:
    """For ``sbatch``. One task a device; a job that is to be taken away saves first and is put back
    into the queue."""
    options = [
        f"--job-name={shlex.quote(job.name)}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.devices}",
        *([f"--gpus-per-node={job.devices}"] if job.gpus else []),
        f"--cpus-per-task={job.cpus_per_task}",
        f"--chdir={shlex.quote(str(Path.cwd()))}",
        "--output=%x-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=SIGUSR1@{_SAVE_S}",
        *job.sbatch,
    ]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        f"# SIGUSR1 comes {_SAVE_S} s before the time limit: all ranks finish their step and "
        "save, and the job goes back into the queue.",
        "# Before a preemption it comes only if slurm.conf has "
        "PreemptParameters=send_user_signal; at SIGTERM the ranks save, too.",
        "set -euo pipefail",
        "",
        'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        f'export MASTER_PORT="{_PORT_OF_JOB}"',
        'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"',
        "",
        # srun does not take the number of cores from the batch job since SLURM 22.05.
        _command(
            ['srun --kill-on-bad-exit=1 --cpus-per-task="$OMP_NUM_THREADS"'],
            job,
            [sys.executable, "-m", "lightning_ptdp"],
        ),
    ]
    return "\n".join(lines) + "\n"


def torchrun_script(job: LaunchJob) -> str:
    """For bash, on every machine. After a failure all processes are started again, and continue."""
    meet, where = ["--standalone"], []
    if job.nodes > 1:
        at = (
            shlex.quote(job.rendezvous)
            if job.rendezvous
            else f'"${{MASTER_ADDR:?the first node}}:${{MASTER_PORT:-{_PORT}}}"'
        )
        meet = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={at}",
            f"--rdzv-id={shlex.quote(job.name)}",
        ]
        where = (
            []
            if job.rendezvous
            else ["# Run this on each of the nodes, with MASTER_ADDR=the first one's name."]
        )
    options = [
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.devices}",
        f"--max-restarts={job.max_restarts}",
    ]
    lines = [
        "#!/bin/bash",
        *where,
        "set -euo pipefail",
        f"cd {shlex.quote(str(Path.cwd()))}",
        f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{job.cpus_per_task}}}"',
        "",
        _command(
            [shlex.quote(sys.executable), "-m torch.distributed.run", *options, *meet],
            job,
            ["-m", "lightning_ptdp"],
        ),
    ]
    return "\n".join(lines) + "\n"


def _command(launcher: Sequence[str], job: LaunchJob, program: Sequence[str]) -> str:
    """The last line, which the shell becomes, so that signals arrive."""
    parts = [
        " ".join(launcher),
        f"{shlex.join(program)} fit",
        *(shlex.join(option.words) for option in options_on(job.arguments)),
    ]
    return "exec " + " \\\n    ".join(parts)
