"""Scripts that start ``ptdp fit`` on many devices: SLURM, torchrun, Kubernetes and SkyPilot.

Shell scripts run in the current folder with the current interpreter.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ptdp.base.option_types import Count, Size, check_types
from lightning_ptdp.cli.command_line import options_on
from lightning_ptdp.cli.config_files import dump_yaml

_SAVE_S = 120
_PORT = 29500
# SLURM job ids are unique on a cluster, so two jobs on one node use different ports.
_PORT_OF_JOB = "$((20000 + SLURM_JOB_ID % 20000))"


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """Command, nodes and devices of a job.

    Attributes:
        arguments: Arguments of ``ptdp fit``.
        nodes: Number of machines.
        devices: Processes per machine, one per device.
        gpus: Whether the devices are GPUs.
        cpus_per_task: CPU cores per process.
        name: Name of the job.
        sbatch: Additional options of sbatch, such as "--partition=a100".
        max_restarts: Number of times that torchrun restarts all processes after a failure.
        rendezvous: host:port of torchrun's rendezvous; None means ``$MASTER_ADDR:$MASTER_PORT``.
        image: Container image; None means that of the runtime.
        runtime: Kubeflow's cluster-wide training runtime.
        gpu_type: SkyPilot's name of the GPUs, such as "A100".
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
    image: str | None = None
    runtime: str = "torch-distributed"
    gpu_type: str | None = None

    def __post_init__(self) -> None:
        check_types(self)


def slurm_script(job: LaunchJob) -> str:
    """Return a script for ``sbatch``, with one task per device.

    A job that SLURM is about to end saves first and goes back into the queue.
    """
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
        f"# SIGUSR1 is sent {_SAVE_S} s before the time limit: all ranks finish their step and "
        "save, and the job is requeued.",
        "# Before a preemption, it is sent only if slurm.conf has "
        "PreemptParameters=send_user_signal. The ranks also save after SIGTERM.",
        "set -euo pipefail",
        "",
        'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        f'export MASTER_PORT="{_PORT_OF_JOB}"',
        'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"',
        "",
        # Since SLURM 22.05, srun does not inherit the number of cores from the batch job.
        _command(
            ['srun --kill-on-bad-exit=1 --cpus-per-task="$OMP_NUM_THREADS"'],
            job,
            [sys.executable, "-m", "lightning_ptdp"],
        ),
    ]
    return "\n".join(lines) + "\n"


def torchrun_script(job: LaunchJob) -> str:
    """Return a bash script to run on every machine.

    After a failure, torchrun restarts all processes, and training continues.
    """
    rendezvous = ["--standalone"]
    comments = []
    if job.nodes > 1:
        endpoint = (
            shlex.quote(job.rendezvous)
            if job.rendezvous
            else f'"${{MASTER_ADDR:?the first node}}:${{MASTER_PORT:-{_PORT}}}"'
        )
        rendezvous = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-id={shlex.quote(job.name)}",
        ]
        comments = (
            []
            if job.rendezvous
            else [
                "# Run this on each of the nodes, with MASTER_ADDR set to the name of the "
                "first one."
            ]
        )
    options = [
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.devices}",
        f"--max-restarts={job.max_restarts}",
    ]
    lines = [
        "#!/bin/bash",
        *comments,
        "set -euo pipefail",
        f"cd {shlex.quote(str(Path.cwd()))}",
        f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{job.cpus_per_task}}}"',
        "",
        _command(
            [shlex.quote(sys.executable), "-m torch.distributed.run", *options, *rendezvous],
            job,
            ["-m", "lightning_ptdp"],
        ),
    ]
    return "\n".join(lines) + "\n"


def kubernetes_job(job: LaunchJob) -> str:
    """Return a TrainJob of Kubeflow Trainer 2 as YAML.

    Each node runs torchrun, which takes the numbers of nodes and processes and its rendezvous from
    the job's ``PET_`` variables.

    Raises:
        ValueError: The name has no letter or digit.
    """
    name = _label(job.name)
    words = [word for option in options_on(job.arguments) for word in option.words]
    limits = {"cpu": job.cpus_per_task * job.devices}
    trainer: dict[str, Any] = {
        "numNodes": job.nodes,
        "numProcPerNode": job.devices,
        "command": ["torchrun", "-m", "lightning_ptdp", "fit", *words],
        "env": [{"name": "OMP_NUM_THREADS", "value": str(job.cpus_per_task)}],
        "resourcesPerNode": {
            "limits": limits | ({"nvidia.com/gpu": job.devices} if job.gpus else {})
        },
    }
    manifest = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"name": job.runtime},
            "trainer": ({"image": job.image} if job.image else {}) | trainer,
        },
    }
    return dump_yaml(manifest)


def skypilot_task(job: LaunchJob) -> str:
    """Return a task of SkyPilot as YAML, whose nodes run torchrun in a copy of this folder.

    Raises:
        ValueError: The type of the GPUs is missing, or the name has no letter or digit.
    """
    resources: dict[str, Any] = {"image_id": f"docker:{job.image}"} if job.image else {}
    if job.gpus and job.gpu_type is None:
        raise ValueError("SkyPilot needs the type of the GPUs. Add --gpu-type, such as A100")
    if job.gpus:
        resources["accelerators"] = {job.gpu_type: job.devices}
    else:
        resources["cpus"] = f"{job.cpus_per_task * job.devices}+"
    options = [
        '--nnodes="$SKYPILOT_NUM_NODES"',
        f"--nproc-per-node={job.devices}",
        '--node-rank="$SKYPILOT_NODE_RANK"',
        '--master-addr="$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"',
        f"--master-port={_PORT}",
    ]
    return dump_yaml(
        {
            "name": _label(job.name),
            "num_nodes": job.nodes,
            "workdir": ".",
            "resources": resources,
            "envs": {"OMP_NUM_THREADS": str(job.cpus_per_task)},
            "run": _command(["torchrun", *options], job, ["-m", "lightning_ptdp"]) + "\n",
        },
    )


def _label(name: str) -> str:
    """Return a name as a label of the DNS.

    Raises:
        ValueError: It has no letter or digit.
    """
    label = re.sub("[^a-z0-9]+", "-", name.lower())[:50].strip("-")
    if not label:
        raise ValueError(f"job-name={name!r} needs a letter or a digit with this launcher")
    return label


def _command(launcher: Sequence[str], job: LaunchJob, program: Sequence[str]) -> str:
    """Return the script's last line.

    Its ``exec`` replaces the shell, so that signals reach the program.
    """
    parts = [
        " ".join(launcher),
        f"{shlex.join(program)} fit",
        *(shlex.join(option.words) for option in options_on(job.arguments)),
    ]
    return "exec " + " \\\n    ".join(parts)
