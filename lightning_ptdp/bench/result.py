"""Result of a benchmark, the numbers that follow from it, and its tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from lightning_ptdp.base.output import columns, titled_columns


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

    @property
    def sample_s(self) -> float:
        """Return the median time of a step per sample."""
        return self.median_s / self.samples

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


# ---- Tables of benchmark results -----------------------------------------------------------------


def render(one: BenchResult) -> str:
    """Return a table with one number per line."""
    return columns(list(_rows(one)), words=(0,))


def ranked(results: Sequence[BenchResult]) -> list[BenchResult]:
    """Return the results, the fastest first, by samples per second.

    Steps may differ in size."""
    return sorted(results, key=attrgetter("sample_s"))


def table(results: Sequence[BenchResult]) -> str:
    """Return a table with one layout per line, in the given order.

    It contains the planner's estimate and the layout's rank by that estimate."""
    expected = [
        result.predicted_s / result.samples if result.predicted_s else None for result in results
    ]
    order = sorted(seconds for seconds in expected if seconds is not None)
    first = results[0]
    rows = []
    for place, (result, seconds) in enumerate(zip(results, expected, strict=True), 1):
        slower = result.sample_s / first.sample_s - 1
        rows.append(
            {
                "": str(place),
                "layout": result.layout,
                "m": str(result.num_microbatches),
                "step": _ms(result.median_s),
                "p10 to p90": _spread(result),
                "tokens/s": _tokens(result),
                "MFU": _percent(result.mfu),
                "slower by": f"{slower:.0%}" if place > 1 else "-",
                "planner": "-" if result.predicted_s is None else _ms(result.predicted_s),
                "rank": "-" if seconds is None else str(order.index(seconds) + 1),
                "bubble": _percent(result.bubble),
                "memory GiB": _memory(result),
            }
        )
    step = (
        f"{first.samples} samples, {first.tokens:,} tokens"
        if len({result.samples for result in results}) == 1
        else "of varying size"
    )
    return f"{_devices(first)}; a step: {step}\n\n{titled_columns(rows, words=(1,))}"


def _rows(result: BenchResult) -> Iterator[tuple[str, str]]:
    yield "layout", f"{result.layout} m{result.num_microbatches}"
    yield "devices", _devices(result)
    yield "step", f"{result.samples} samples, {result.tokens:,} tokens"
    yield "step time, median", _ms(result.median_s)
    yield "p10 to p90", _spread(result)
    yield (
        "planner's estimate",
        "-" if result.predicted_s is None else f"{_ms(result.predicted_s)} ({result.predicted_by})",
    )
    yield "tokens/s", _tokens(result)
    yield "model TFLOP/s per device", f"{result.flops_per_s / 1e12:.4g}" if result.flops else "-"
    yield "MFU", _percent(result.mfu)
    yield "peak memory, by rank", f"{_memory(result)} GiB"
    if result.predicted_bytes is not None:
        yield "planner's estimate, fullest rank", f"{result.predicted_bytes / 2**30:.2f} GiB"
    if result.bubble is not None:
        yield "bubble, measured", _percent(result.bubble)
        yield "bubble of the schedule", _percent(result.ideal_bubble)


def _devices(result: BenchResult) -> str:
    return f"{result.world_size} x {result.device}, {result.precision}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _spread(result: BenchResult) -> str:
    return f"{result.percentile_s(10) * 1e3:.1f} to {_ms(result.percentile_s(90))}"


def _tokens(result: BenchResult) -> str:
    return f"{result.tokens_per_s:,.0f}" if result.tokens else "-"


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"


def _memory(result: BenchResult) -> str:
    gib = [f"{peak / 2**30:.2f}" for peak in result.peak_memory_bytes]
    return " ".join(gib) if len(gib) <= 4 else f"{min(gib, key=float)} to {max(gib, key=float)}"
