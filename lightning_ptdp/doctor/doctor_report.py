"""An inspection as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from lightning_ptdp.base.output import columns
from lightning_ptdp.doctor.bandwidth import Measurement
from lightning_ptdp.doctor.check import Status
from lightning_ptdp.doctor.inspection import Inspection


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
