"""Checks of the accelerators: number, memory and correct arithmetic.

Arithmetic is checked in float32 and bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lightning_ptdp.doctor.check import Check, enough, failed, ok

__all__ = ["check_arithmetic", "check_devices", "count_gpus"]

_GIB = 2**30
_SIZE = 256
# Largest error of a product of normally distributed numbers, relative to its largest element: some
# units in the last place, summed over _SIZE terms.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-2}


def count_gpus() -> int:
    """Return the number of GPUs that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_devices(wanted: int) -> Iterator[Check]:
    """Check the GPUs that torch sees, for ``wanted`` processes."""
    if not torch.cuda.is_available():
        why = (
            "this torch is built without CUDA" if torch.version.cuda is None else "CUDA finds none"
        )
        yield ok("GPUs", f"none ({why}): processes run on the CPU and communicate with gloo")
        yield from check_arithmetic(torch.device("cpu"))
        return
    count = torch.cuda.device_count()
    found = (
        f"{count} for {wanted} processes"
        if count < wanted
        else f"{count} (CUDA {torch.version.cuda})"
    )
    yield enough(
        count >= wanted,
        "GPUs",
        found,
        f"use --devices {count}, or one GPU per process; this run tests gloo on the CPU",
    )
    for index in range(count):
        yield _check_memory(index)
        yield from check_arithmetic(torch.device("cuda", index))


def check_arithmetic(device: torch.device) -> Iterator[Check]:
    """Compare a matrix product in float32 and bfloat16 with float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(_SIZE, _SIZE, dtype=torch.float64, generator=generator) for _ in range(2))
    exact = a @ b
    for dtype, tolerance in _TOLERANCE.items():
        subject = f"{device} {str(dtype).removeprefix('torch.')}"
        try:
            found = (a.to(device, dtype) @ b.to(device, dtype)).to("cpu", torch.float64)
        except RuntimeError as error:
            yield failed(
                subject,
                str(error).partition("\n")[0],
                "see the driver's log; another process may be using the device",
            )
            continue
        error_size = ((found - exact).abs().max() / exact.abs().max()).item()
        if not error_size < tolerance:  # also true for NaN
            yield failed(
                subject,
                f"a matrix product is wrong by {error_size:.1e}",
                "do not use the device: it or its driver is broken",
            )
        elif dtype == torch.bfloat16 and not _is_bf16_fast(device):
            slow = "a matrix product is correct, but emulated and slow"
            yield enough(
                device.type == "cpu", subject, slow, "train with --trainer.precision 16-mixed"
            )
        else:
            yield ok(subject, "a matrix product is correct")


def _check_memory(index: int) -> Check:
    subject = f"cuda:{index} memory"
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return failed(
            subject, str(error).partition("\n")[0], "see nvidia-smi: the device does not respond"
        )
    name = torch.cuda.get_device_name(index)
    found = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free ({name})"
    return enough(free >= total / 2, subject, found, "another process is using it (see nvidia-smi)")


def _is_bf16_fast(device: torch.device) -> bool:
    """Return True if the device has instructions for bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16"))
