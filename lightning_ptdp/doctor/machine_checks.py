"""Results of checks, and the checks of the machine: installation, memory, files, accelerators."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata

import torch

from lightning_ptdp.base import requirements
from lightning_ptdp.base.requirements import (
    DISTRIBUTION,
    RequirementError,
    find_problem,
    read_declared,
)
from lightning_ptdp.shims.torch import cuda_error


class Status(StrEnum):
    """Severity of a result."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Check:
    """Result of one check.

    Attributes:
        subject: Checked subject, in a word or two.
        status: Whether training can work with it.
        found: State of the subject.
        remedy: What solves the problem; "" if there is none.
    """

    subject: str
    status: Status
    found: str
    remedy: str = ""


def ok(subject: str, found: str) -> Check:
    """Return a result that requires no action."""
    return Check(subject=subject, status=Status.OK, found=found)


def warning(subject: str, found: str, remedy: str) -> Check:
    """Return a result with which training works, but not at its best."""
    return Check(subject=subject, status=Status.WARNING, found=found, remedy=remedy)


def enough(is_enough: bool, subject: str, found: str, remedy: str) -> Check:
    """Return an ``ok`` result if ``is_enough``, else a warning."""
    return ok(subject, found) if is_enough else warning(subject, found, remedy)


def failed(subject: str, found: str, remedy: str) -> Check:
    """Return a result with which training cannot work."""
    return Check(subject=subject, status=Status.FAILED, found=found, remedy=remedy)


# ---- Checks of cores, memory and open files ------------------------------------------------------


_GIB = 2**30
# A process with torch and Lightning imported, and the activations of a nano model.
_PROCESS_BYTES = 1 * _GIB
_SHARED_BYTES = 1 * _GIB
# A rank has open sockets to all other ranks, and open data chunks, logs and checkpoint files.
_FILES = 1024


def check_cores(*, cores: int, processes: int, accelerated: bool) -> Check:
    """Compare the cores that this process may use with the number of processes."""
    takes_turns = cores < processes and not accelerated
    finding = f"{cores} for {processes} processes" + (
        ", which share the cores" if takes_turns else ""
    )
    remedy = (
        "training works, but its speed says nothing about the layout; use fewer processes "
        "to measure"
    )
    return enough(not takes_turns, "CPU cores", finding, remedy)


def check_memory(*, available: int, total: int, limit: int | None, processes: int) -> Check:
    """Compare the free memory, within the container's limit, with the need of the processes."""
    usable = available if limit is None else min(available, limit)
    finding = f"{usable / _GIB:.1f} GiB free of {total / _GIB:.1f}"
    if limit is not None and limit < total:
        finding += f" (the container may use {limit / _GIB:.1f})"
    remedy = (
        f"use fewer processes: {processes} need about {processes * _PROCESS_BYTES / _GIB:.0f} GiB"
    )
    return enough(usable >= processes * _PROCESS_BYTES, "memory", finding, remedy)


def check_shared_memory(free: int | None) -> Check:
    """Check the free bytes of /dev/shm, which data workers and NCCL use for messages.

    Args:
        free: Free bytes; None if there is no /dev/shm.
    """
    if free is None:
        return warning(
            "/dev/shm", "missing", "mount it: data workers (num_workers > 0) and NCCL need it"
        )
    remedy = "data workers and NCCL may fail; in Docker: --shm-size=8g or --ipc=host"
    return enough(free >= _SHARED_BYTES, "/dev/shm", f"{free / _GIB:.2f} GiB free", remedy)


def check_open_files(soft: int, hard: int) -> Check:
    """Check the soft and hard limits of open files; -1 means no limit."""
    finding = f"{_limit(soft)}, can be raised to {_limit(hard)}" if soft != hard else _limit(soft)
    return enough(
        soft < 0 or soft >= _FILES,
        "open files",
        finding,
        f"ulimit -n {hard if hard >= 0 else 65536}",
    )


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else str(value)


# ---- Checks of the installation against the package's own metadata -------------------------------


def check_python(version: str | None = None) -> Check:
    """Compare the interpreter's version with ``Requires-Python``.

    Args:
        version: Version to compare; None means this interpreter's.
    """
    try:
        requirements.check_python(version)
    except RequirementError as error:
        finding, _, remedy = str(error).partition(". Run: ")
        return failed("python", finding, remedy)
    return ok("python", version or platform.python_version())


def check_packages(
    lines: Sequence[str] | None = None, installed: Callable[[str], str] = metadata.version
) -> Iterator[Check]:
    """Compare every library in the metadata, including optional ones, with its version range.

    Args:
        lines: Lines as in ``Requires-Dist``; None means those of the installed package.
        installed: Returns the version of a distribution, or raises ``PackageNotFoundError``.
    """
    for declared in read_declared(lines):
        name = declared.name
        problem = find_problem(declared, installed)
        if problem is None:
            yield ok(name, f"{installed(name)} ({declared.range})")
        elif problem == declared.missing and declared.extra:
            yield ok(name, f"not installed; optional: {declared.command}")
        else:
            finding, _, remedy = problem.rpartition(". Run: ")
            yield (warning if declared.extra else failed)(name, finding, remedy)


def check_entry_points(environment: Mapping[str, str]) -> Check:
    """Check that ``Trainer(strategy="ptdp")`` works without an import of this package."""
    subject = 'strategy="ptdp"'
    remedy = "import lightning_ptdp before creating the Trainer"
    names = [entry.name for entry in metadata.entry_points(group="torch.backends")]
    if "lightning_ptdp" not in names:
        return warning(
            subject,
            "the entry point is not installed",
            f"{remedy}, or install {DISTRIBUTION} again",
        )
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return warning(
            subject, "TORCH_DEVICE_BACKEND_AUTOLOAD=0 prevents torch from registering it", remedy
        )
    return ok(subject, "registered when torch is imported")


def check_recipes(names: Callable[[], Sequence[str]]) -> Check:
    """Check that the recipes are installed.

    Args:
        names: Returns their names, or raises ``FileNotFoundError``.
    """
    try:
        return ok("recipes", f"{len(names())} found")
    except FileNotFoundError as error:
        return failed("recipes", str(error), f"pip install --force-reinstall {DISTRIBUTION}")


# ---- Checks of the accelerators: number, memory and correct arithmetic ---------------------------
#
# Arithmetic is checked in float32 and bfloat16.


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
        yield ok(
            "GPUs", f"none ({cuda_error()}): processes run on the CPU and communicate with gloo"
        )
        yield from check_arithmetic(torch.device("cpu"))
        return
    count = torch.cuda.device_count()
    finding = (
        f"{count} for {wanted} processes"
        if count < wanted
        else f"{count} (CUDA {torch.version.cuda})"
    )
    yield enough(
        count >= wanted,
        "GPUs",
        finding,
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
            result = (a.to(device, dtype) @ b.to(device, dtype)).to("cpu", torch.float64)
        except RuntimeError as error:
            yield failed(
                subject,
                str(error).partition("\n")[0],
                "see the driver's log; another process may be using the device",
            )
            continue
        error_size = ((result - exact).abs().max() / exact.abs().max()).item()
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
    finding = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free ({name})"
    return enough(
        free >= total / 2, subject, finding, "another process is using it (see nvidia-smi)"
    )


def _is_bf16_fast(device: torch.device) -> bool:
    """Return True if the device has instructions for bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16"))
