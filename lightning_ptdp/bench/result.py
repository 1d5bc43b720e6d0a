"""Result of a benchmark, and the numbers that follow from it."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["BenchResult"]


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """The measured steps of one layout.

    Attributes:
        layout: Such as "t2 p2 v1 d1".
        device: Its name.
        precision: Lightning's.
        world_size: Number of processes.
        num_microbatches: m, of a batch of a replica.
        samples: Of a step, over all replicas.
        tokens: The same; 0 if the batches hold no tokens.
        flops: Model operations of a step, forward and backward, over all devices; 0 if the module
            does not tell.
        seconds: Of every measured step.
        peak_memory_bytes: Of each rank's tensors.
        peak_flops: Operations a second of which a device is capable; None if that is not known.
        bubble: Bubble time over ideal time of one step of the pipeline, as measured; None without a
            pipeline.
        ideal_bubble: The same of the schedule with equal stages and free messages.
        predicted_s: The planner's estimate of a step; None for what it does not know.
        predicted_bytes: Its estimate of the fullest rank's peak.
        predicted_by: Whose figures of the device these are.
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
        """Median step."""
        return statistics.median(self.seconds)

    def percentile_s(self, percent: int) -> float:
        """Step that ``percent`` of all steps are quicker than, interpolated."""
        ordered = sorted(self.seconds)
        place = (len(ordered) - 1) * percent / 100
        low, part = int(place), place % 1
        return ordered[low] + (part * (ordered[low + 1] - ordered[low]) if part else 0.0)

    @property
    def tokens_per_s(self) -> float:
        """Over all devices, of the median step."""
        return self.tokens / self.median_s

    @property
    def flops_per_s(self) -> float:
        """Model operations a second of one device, of the median step."""
        return self.flops / self.median_s / self.world_size

    @property
    def mfu(self) -> float | None:
        """Model operations over what the device is capable of (arXiv 2204.02311, appendix B)."""
        return self.flops_per_s / self.peak_flops if self.peak_flops and self.flops else None

    def as_dict(self) -> dict[str, Any]:
        """All fields, and what follows from them."""
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
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, values: dict[str, Any]) -> BenchResult:
        """From ``as_dict`` or what ``write`` wrote."""
        fields: dict[str, Any] = {name: values[name] for name in cls.__dataclass_fields__}
        for name in ("seconds", "peak_memory_bytes"):
            fields[name] = tuple(fields[name])
        return cls(**fields)
