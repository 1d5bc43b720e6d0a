"""Checks of this machine: limits, device, and processes that were started for the run."""

from __future__ import annotations

import multiprocessing
import re
import resource
import shlex
import socket
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_ptdp.shims.torch import cuda_error
from lightning_ptdp.shims.torch_distributed import nccl_creator, nccl_versions
from lightning_ptdp.world.rendezvous_address import LOOPBACK, MPI, SLURM_TASKS, WORLD, number_in

_LOOPBACK_S = 5.0
# Measured with torch 2.15 and gloo, recipe gpt/nano: rank 0 of 4 has 85 open files, the other ranks
# have 70. Each group connects all of its ranks with each other, so that the number grows with the
# world.
_FILES = 64
_FILES_PER_RANK = 16


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
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_S).close()
    except OSError as error:
        raise ValueError(
            f"processes on this machine cannot connect to {LOOPBACK}: {error.strerror or error}. "
            "Start the loopback interface (ip link set lo up), or use devices=1"
        ) from error


# ---- Checks of this rank's device, made before the rendezvous of the ranks -----------------------


_BF16 = (8, 0)


def check_visible(devices: Sequence[torch.device], local_rank: int) -> None:
    """Check that every process of this machine has a device that torch sees.

    Args:
        devices: Devices of the processes.
        local_rank: Index of this process on this machine.

    Raises:
        ValueError: This process has no device, or one of the GPUs is not visible.
    """
    if local_rank >= len(devices):
        raise ValueError(
            f"devices={len(devices)}, so local rank {local_rank} has no device. Start "
            f"{len(devices)} processes on this machine, or use more devices"
        )
    numbers = [device.index for device in devices if device.type == "cuda"]
    if numbers and max(numbers) >= (count := torch.cuda.device_count()):
        raise ValueError(
            f"devices={numbers}, but local rank {local_rank} sees {count} GPUs, numbered from 0. "
            "Use other devices=..., or set CUDA_VISIBLE_DEVICES to more GPUs"
        )


def check_device(device: torch.device, *, precision: str) -> None:
    """Start CUDA if this rank uses it, and check the rank's device.

    Raises:
        ValueError: CUDA does not start, or as for ``check_gpu``.
    """
    if device.type == "cuda" and (reason := cuda_error()):
        raise ValueError(
            f"accelerator='gpu': torch {torch.__version__} cannot use the GPUs: {reason}. Install "
            f"a driver for CUDA {torch.version.cuda}, or a torch built for the CUDA of the driver"
        )
    if device.type == "cuda" and torch.version.hip is None:
        check_gpu(
            torch.cuda.get_device_name(device),
            torch.cuda.get_device_capability(device),
            kernels=torch.cuda.get_arch_list(),
            precision=precision,
        )


def check_gpu(
    name: str, capability: tuple[int, int], *, kernels: Collection[str], precision: str
) -> None:
    """Check an NVIDIA GPU, and warn if it has no units for bfloat16.

    Args:
        name: Name of the GPU.
        capability: Compute capability (major, minor).
        kernels: Targets for which torch was built. A kernel for "sm_90" runs on GPUs of the same
            major version and the same or a larger minor version; "compute_90" is compiled for any
            newer GPU.
        precision: Lightning's name of the precision. Without units for bfloat16, "bf16" is slow.

    Raises:
        ValueError: torch has no kernels for the GPU.
    """
    version = ".".join(map(str, capability))
    if kernels and not any(_runs(kernel, capability) for kernel in kernels):
        raise ValueError(
            f"this torch {torch.__version__} has no kernels for {name} (compute capability "
            f"{version}), only for {', '.join(kernels)}. Install a torch that supports it, or "
            "use accelerator='cpu'"
        )
    if precision.startswith("bf16") and capability < _BF16:
        warnings.warn(
            f"precision={precision!r} is slow on {name} (compute capability {version}), which "
            f"computes in float32 instead. Use precision={precision.replace('bf16', '16')!r}",
            stacklevel=2,
        )


def check_nccl() -> None:
    """Check that "nccl" is torch's, with the library that torch was built for.

    Raises:
        ValueError: It is not. NCCL's own error would name no cause.
    """
    creator = nccl_creator()
    if not creator.startswith("torch."):
        raise ValueError(
            f"process_group_backend='nccl' is {creator} in this process, whose rules for "
            "streams and groups are unknown. Do not register it as 'nccl', or use 'gloo'"
        )
    built, loaded = nccl_versions()
    if loaded < built:
        raise ValueError(
            f"NCCL {'.'.join(map(str, loaded))} is loaded, but torch {torch.__version__} needs "
            f"{'.'.join(map(str, built))}. Remove the older libnccl.so.2 from LD_LIBRARY_PATH and "
            "LD_PRELOAD"
        )


def check_other_gpus(
    store: dist.Store, *, rank: int, tensor_ranks: Sequence[int], gpu: Any
) -> None:
    """Compare the GPU of this rank with those of the ranks that came before.

    NCCL's own error names neither ranks nor GPUs. No rank waits here.

    Args:
        store: Store of all ranks.
        rank: This rank.
        tensor_ranks: Ranks of its tensor-parallel group.
        gpu: Properties of its GPU.

    Raises:
        ValueError: Another rank uses the same GPU, or the tensor-parallel group has different GPUs.
    """
    peer = store.compare_set(f"gpu/{gpu.uuid}", "", str(rank)).decode()
    if peer != str(rank):
        raise ValueError(
            f"ranks {peer} and {rank} use the same {gpu.name} ({gpu.uuid}): NCCL needs one GPU "
            "per process. Use other devices=..., or CUDA_VISIBLE_DEVICES"
        )
    first = store.compare_set(f"gpus/{tensor_ranks[0]}", "", gpu.name).decode()
    if first != gpu.name:
        raise ValueError(
            f"tensor_parallel_size={len(tensor_ranks)}: a layer is split over {first} and "
            f"{gpu.name} (ranks {', '.join(map(str, tensor_ranks))}), and would wait for the "
            "slower one. Use devices of one kind, or split the model by pipeline_parallel_size"
        )


def _runs(kernel: str, capability: tuple[int, int]) -> bool:
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", kernel)
    if match is None:
        return False
    kind, major, minor, special = match.groups()
    built = int(major), int(minor)
    if special == "a":
        return built == capability
    return built <= capability and (kind == "compute" or built[0] == capability[0])


# ---- Checks for processes that a launcher has started but the Trainer does not count -------------


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
        single_process = devices * num_nodes == 1
        # A process that starts the other processes runs once on each node.
        started_again = name in MPI and not joins and count != num_nodes
        if not single_process and not started_again:
            continue
        if joins:
            remedy = (
                f"Use Trainer(devices=..., num_nodes=...) with devices * num_nodes = {count}, or "
                "start one process"
            )
        else:
            remedy = (
                f"Use Trainer(devices={count}, num_nodes=1) and start it with: torchrun "
                f"--nproc-per-node {count} --no-python {shlex.join(sys.orig_argv)}"
            )
        raise ValueError(
            f"{name}={count}, but Trainer(devices={devices}, num_nodes={num_nodes}), so each "
            f"of the {count} processes would run a separate training. {remedy}"
        )


def _announced(environment: Any, variables: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the sources that announce a number of processes, and the number."""
    for name in (*MPI, SLURM_TASKS, WORLD):
        yield name, number_in(variables, name)
    # SLURM's environment counts the tasks of the job, even in a shell that runs one process.
    if (
        environment is not None
        and environment.creates_processes_externally
        and not hasattr(environment, "requeue_signal")
    ):
        yield f"{type(environment).__name__}.world_size()", environment.world_size()
