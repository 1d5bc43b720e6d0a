"""Checks of this rank's device, made before the rendezvous of the ranks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["check_device", "check_gpu", "check_other_gpus"]

_BF16 = (8, 0)


def check_device(device: torch.device, *, precision: str) -> None:
    """Check the device of this rank, which must be set up.

    Raises:
        ValueError: See ``check_gpu``.
    """
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
    shown = ".".join(map(str, capability))
    if kernels and not any(_runs(kernel, capability) for kernel in kernels):
        raise ValueError(
            f"this torch {torch.__version__} has no kernels for {name} (compute capability "
            f"{shown}), only for {', '.join(kernels)}. Install a torch that supports it, or "
            "use accelerator='cpu'"
        )
    if precision.startswith("bf16") and capability < _BF16:
        warnings.warn(
            f"precision={precision!r} is slow on {name} (compute capability {shown}), which "
            f"computes in float32 instead. Use precision={precision.replace('bf16', '16')!r}",
            stacklevel=2,
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
    other = store.compare_set(f"gpu/{gpu.uuid}", "", str(rank)).decode()
    if other != str(rank):
        raise ValueError(
            f"ranks {other} and {rank} use the same {gpu.name} ({gpu.uuid}): NCCL needs one GPU "
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
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", kernel)
    if found is None:
        return False
    kind, major, minor, special = found.groups()
    built = int(major), int(minor)
    if special == "a":
        return built == capability
    return built <= capability and (kind == "compute" or built[0] == capability[0])
