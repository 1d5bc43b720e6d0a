"""Checks of this rank's device, made before the rendezvous of the ranks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection

import torch

__all__ = ["check_device", "check_gpu"]

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
            f"{shown}), only {', '.join(kernels)}: install a "
            "torch that was built for it, or use accelerator='cpu'"
        )
    if precision.startswith("bf16") and capability < _BF16:
        warnings.warn(
            f"precision={precision!r} on {name} (compute capability {shown}), which multiplies in "
            "float32 in its place and is slow: "
            f"precision={precision.replace('bf16', '16')!r} is fast there",
            stacklevel=2,
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
