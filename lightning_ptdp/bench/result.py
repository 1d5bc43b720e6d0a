"""Result of a benchmark, and the numbers that follow from it."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["BenchResult"]


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Measured steps of one layout.

    Attributes:
        layout: Degrees, such as "t2 p2 v1 d1".
        device: Name of the device.
        precision: Lightning's name of the precision.
        world_size: Number of processes.
        num_microbatches: m, microbatches in a batch of a replica.
        samples: Samples of a step, over all replicas.
        tokens: Tokens of a step, over all replicas; 0 if the batches hold no tokens.
        flops: Model operations of a step, forward and backward, over all devices; 0 if the module
            does not report them.
        seconds: Time of every measured step.
        peak_memory_bytes: Peak bytes of each rank's tensors.
        peak_flops: Peak operations per second of a device; None if unknown.
        bubble: Measured bubble time over ideal time of one step of the pipeline; None without a
            pipeline.
        ideal_bubble: Bubble of the schedule with equal stages and free messages.
        predicted_s: The planner's estimate of a step; None if it has none.
        predicted_bytes: The planner's estimate of the peak of the rank that needs most.
        predicted_by: Origin of the device's figures.
    """

    layout: str
    device: str
    precision: str
    world_size: int
    num_microbatches: int
    samples: int
    tokens: int
    flops: float
    seconds: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]
    peak_flops: float | None = None
    bubble: float | None = None
    ideal_bubble: float | None = None
    predicted_s: float | None = None
    predicted_bytes: float | None = None
    predicted_by: str = ""

    @property
    def median_s(self) -> float:
        """Return the median time of a step."""
        return statistics.median(self.seconds)

    def percentile_s(self, percent: int) -> float:
        """Return the time below which ``percent`` of all steps are, interpolated."""
        return float(np.percentile(self.seconds, percent))

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second over all devices, for the median step."""
        return self.tokens / self.median_s

    @property
    def flops_per_s(self) -> float:
        """Return the model operations per second of one device, for the median step."""
        return self.flops / self.median_s / self.world_size

    @property
    def mfu(self) -> float | None:
        """Return model operations over the device's peak (arXiv 2204.02311, appendix B)."""
        return self.flops_per_s / self.peak_flops if self.peak_flops and self.flops else None

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, and the numbers that follow from them."""
        derived = {
            "median_s": self.median_s,
            "p10_s": self.percentile_s(10),
            "p90_s": self.percentile_s(90),
            "tokens_per_s": self.tokens_per_s,
            "model_tflops_per_s_per_device": self.flops_per_s / 1e12,
            "mfu": self.mfu,
        }
        return {**asdict(self), **derived}

    def write(self, path: Path) -> None:
        """Write the fields as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, values: dict[str, Any]) -> BenchResult:
        """Return the result from ``as_dict`` or from the JSON of ``write``."""
        fields: dict[str, Any] = {name: values[name] for name in cls.__dataclass_fields__}
        for name in ("seconds", "peak_memory_bytes"):
            fields[name] = tuple(fields[name])
        return cls(**fields)
