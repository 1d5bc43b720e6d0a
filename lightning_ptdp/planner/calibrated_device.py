"""Measurements of a machine in a file, written by ``ptdp doctor --calibrate``.

The file holds a device for the planner and the identity of the machine.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_ptdp.planner.device_presets import known_device
from lightning_ptdp.planner.devices import Cluster, Device, Link, Measured

MACHINE_FILE = Path("ptdp-machine.json")
"""File of ``ptdp doctor --calibrate``, which plan, bench and ``layout="auto"`` read."""

_FORMAT = 2
_STALE = timedelta(days=90)
_MOST_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A measured device.

    Attributes:
        device: The device with its measurements.
        machine: Properties of the measured machine (``machine()``).
        made: Time of the measurement, ISO 8601 with a time zone.
    """

    device: Device
    machine: Mapping[str, str]
    made: str

    def doubt(self) -> str:
        """Return the reason that the measurements may be wrong here and now, or ""."""
        properties = machine()
        differences = [
            f"{name} {self.machine.get(name)!r}, here {value!r}"
            for name, value in properties.items()
            if self.machine.get(name) != value
        ]
        if differences:
            return (
                f"was measured on another machine ({'; '.join(differences)}). To measure this "
                "machine, run ptdp doctor --calibrate"
            )
        age = datetime.now(UTC) - datetime.fromisoformat(self.made)
        if age > _STALE:
            return f"is {age.days} days old. To measure again, run ptdp doctor --calibrate"
        return ""


def machine() -> dict[str, str]:
    """Return the properties that identify this machine and its software."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {
        "host": platform.node(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "torch": torch,
    }


def save_calibration(device: Device, path: Path) -> None:
    """Write the measurements of this machine to a file.

    Raises:
        OSError: The file cannot be written.
    """
    content = {
        "format": _FORMAT,
        "made": datetime.now(UTC).isoformat(),
        "machine": machine(),
        "device": asdict(device),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def load_calibration(path: Path) -> Calibration:
    """Read measurements from a file.

    Raises:
        ValueError: The file is not a calibration, or it has an impossible figure. The message names
            it.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        content = json.loads(path.read_text())
        if content.get("format") != _FORMAT:
            raise ValueError(f"its format is {content.get('format')!r}, not {_FORMAT}")
        timestamp = str(content["made"])
        if datetime.fromisoformat(timestamp).tzinfo is None:
            raise ValueError(f"made={timestamp!r} has no time zone")
        return Calibration(
            device=_device(content["device"]), machine=dict(content["machine"]), made=timestamp
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a file of ptdp doctor --calibrate ({type(error).__name__}: "
            f"{error}). Calibrate again, or name a device"
        ) from error


def device_here(name: str) -> Device | None:
    """Return the calibrated device of this folder, or a preset.

    The device in ``MACHINE_FILE`` is returned if it was measured on this machine and is called
    ``name``. Otherwise the result is the preset for ``name``, or None.
    """
    if MACHINE_FILE.is_file():
        calibration = load_calibration(MACHINE_FILE)
        if calibration.device.name == name and not calibration.doubt():
            return calibration.device
    return known_device(name)


def figures_source(device: Device, processes: int) -> str:
    """Return the source of a device's figures in a few words, and how to obtain better ones.

    Args:
        device: The device of an estimate.
        processes: Number of processes per node in that estimate.
    """
    measured = device.measured
    remedy = f"ptdp doctor --calibrate --devices {processes}"
    if measured is None:
        return f"data sheet of {device.name}, not calibrated; to calibrate, run {remedy}"
    if measured.processes != processes:
        return (
            f"calibrated with --devices {measured.processes} instead of {processes}; to "
            f"calibrate, run {remedy}"
        )
    return f"calibrated with --devices {processes}"


def _device(values: dict[str, Any]) -> Device:
    cluster_values = {**values["cluster"]}
    cluster_values.pop("rail", None)  # earlier files have it, always null
    links = {name: Link(**cluster_values[name]) for name in ("node", "card")}
    cluster = Cluster(**_rows(cluster_values | links))
    return Device(
        **{**values, "cluster": cluster, "measured": Measured(**_rows(values["measured"]))}
    )


def _rows(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with JSON's lists of lists as tuples of tuples."""
    return {
        name: tuple(map(tuple, value)) if isinstance(value, list) else value
        for name, value in values.items()
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
