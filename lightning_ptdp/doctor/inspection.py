"""All checks of the doctor, in order, and their results as text and as JSON."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from lightning_ptdp.base.forked_processes import Tell, run_ranks
from lightning_ptdp.base.output import columns
from lightning_ptdp.doctor import folder_checks
from lightning_ptdp.doctor.links import Measurement
from lightning_ptdp.doctor.machine_checks import (
    Check,
    Status,
    check_cores,
    check_devices,
    check_entry_points,
    check_memory,
    check_open_files,
    check_packages,
    check_python,
    check_recipes,
    check_shared_memory,
    count_gpus,
    failed,
)
from lightning_ptdp.doctor.ranks import check_ranks

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_SHARED_MEMORY = Path("/dev/shm")

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Question:
    """Subject of an inspection.

    Attributes:
        processes: Number of ranks to start.
        backend: "gloo" or "nccl"; None means NCCL if there are as many GPUs as ranks.
        root_dir: Folder to which runs will be written.
        tracking_uri: An MLflow store or server; None skips its check.
        data_dir: Folder of prepared data; None skips its check.
        timeout_s: Limit of each part that can hang.
    """

    processes: int = 2
    backend: str | None = None
    root_dir: Path = Path()
    tracking_uri: str | None = None
    data_dir: Path | None = None
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Section:
    """The checks of one subject."""

    title: str
    checks: tuple[Check, ...]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Results of all checks and measurements."""

    sections: tuple[Section, ...]
    measurements: tuple[Measurement, ...] = ()

    def count(self, status: Status) -> int:
        """Return the number of checks with this status."""
        return sum(check.status == status for section in self.sections for check in section.checks)


def inspect_all(question: Question, *, recipes: Callable[[], list[str]]) -> Inspection:
    """Run all checks.

    Args:
        question: Subject of the inspection.
        recipes: Returns the names of the installed recipes.
    """
    limit = question.timeout_s
    gpus, devices = _limited(
        "devices",
        limit,
        lambda: (count_gpus(), tuple(check_devices(question.processes))),
        lambda check: (0, (check,)),
    )
    writable = _limited("folders", limit, lambda: tuple(_folders(question)), lambda check: (check,))
    backend = question.backend or ("nccl" if gpus >= question.processes else "gloo")
    ranks = check_ranks(count=question.processes, backend=backend, timeout_s=limit)
    device = "GPUs" if backend == "nccl" else "CPU"
    installation = (
        check_python(),
        *check_packages(),
        check_entry_points(os.environ),
        check_recipes(recipes),
    )
    machine = tuple(_machine(question.processes, accelerated=backend == "nccl"))
    sections = (
        Section("installation", installation),
        Section("machine", machine),
        Section("devices", devices),
        Section("folders", writable),
        Section(f"ranks ({question.processes} on the {device}, {backend})", ranks.checks),
    )
    return Inspection(sections=sections, measurements=ranks.measurements)


def _limited(
    subject: str, timeout_s: float, look: Callable[[], _T], instead: Callable[[Check], _T]
) -> _T:
    """Return the result of ``look``, or ``instead`` of a failed check if it does not answer.

    ``look`` runs in its own process, because a broken file system or driver may block it forever.
    """

    def in_a_process(rank: int, tell: Tell) -> _T:
        tell(subject)
        return look()

    outcome = run_ranks(in_a_process, count=1, timeout_s=timeout_s)
    if 0 in outcome.results:
        return outcome.results[0]
    message = outcome.errors.get(0, f"no answer within {timeout_s:g} s")
    return instead(
        failed(
            subject,
            message,
            "a driver or a (network) file system hangs: see dmesg, or use a longer --timeout",
        )
    )


def _machine(processes: int, *, accelerated: bool) -> Iterator[Check]:
    memory = psutil.virtual_memory()
    yield check_cores(
        cores=len(os.sched_getaffinity(0)), processes=processes, accelerated=accelerated
    )
    yield check_memory(
        available=memory.available,
        total=memory.total,
        limit=_container_limit(),
        processes=processes,
    )
    yield check_shared_memory(
        shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None
    )
    yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def _folders(question: Question) -> Iterator[Check]:
    yield folder_checks.check_root_dir(question.root_dir)
    yield folder_checks.check_database_locks(question.root_dir)
    yield folder_checks.check_clock(question.root_dir)
    if question.tracking_uri is not None:
        yield folder_checks.check_tracking_store(
            question.tracking_uri, timeout_s=min(question.timeout_s, 5.0)
        )
    if question.data_dir is not None:
        yield folder_checks.check_data_folder(question.data_dir)


def _container_limit() -> int | None:
    text = _CONTAINER_LIMIT.read_text().strip() if _CONTAINER_LIMIT.is_file() else "max"
    return None if text == "max" else int(text)


def render(inspection: Inspection) -> str:
    """Return one line per check with its remedy below, and a table of the measurements."""
    return "\n".join(_lines(inspection))


def as_json(inspection: Inspection) -> str:
    """Return an inspection as JSON.

    The format is ``{"ok": bool, "sections": [{"title", "checks": [...]}], "measurements": [...]}``.
    Sizes are in bytes, times in seconds.
    """
    return json.dumps({"ok": inspection.count(Status.FAILED) == 0, **asdict(inspection)}, indent=2)


def _lines(inspection: Inspection) -> Iterator[str]:
    width = max(len(check.subject) for section in inspection.sections for check in section.checks)
    for section in inspection.sections:
        yield section.title
        for check in section.checks:
            yield f"  {check.status:8} {check.subject:{width}}  {check.found}"
            if check.remedy:
                yield f"  {'':8} {'':{width}}  -> {check.remedy}"
        yield ""
    if inspection.measurements:
        yield _table(inspection.measurements)
        yield ""
    yield ", ".join(f"{inspection.count(status)} {status}" for status in Status)


def _table(measurements: Sequence[Measurement]) -> str:
    sizes = dict.fromkeys(measurement.size for measurement in measurements)
    rows = {
        name: [f"  {name}"]
        for name in ("between ranks", *(measurement.operation for measurement in measurements))
    }
    rows["between ranks"] += map(_size, sizes)
    for measurement in measurements:  # grouped by size
        rows[measurement.operation].append(
            f"{measurement.seconds * 1e3:.3f} ms {measurement.bytes_per_s / 1e9:8.3f} GB/s"
        )
    return columns(list(rows.values()), words=(0,))


def _size(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
