"""Measurements of ``gpu.py``: seconds, peak memory, and the time in which the GPU is idle."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from turns import Contestant

__all__ = ["Measured", "idle_share", "measure"]

ROUNDS, ROUND_S, MOST_STEPS, PROFILED = 5, 0.7, 20, 3
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Attributes:
    seconds: Of a step, in each round.
    peak_bytes: Of tensors on the GPU; 0 without one.
    idle: Share of the time between the first and the last kernel of some steps in which none runs;
    None without a GPU.
    parameters: Of the model, tied ones once.
    """

    seconds: tuple[float, ...]
    peak_bytes: int
    idle: float | None
    parameters: int


def measure(contestant: Contestant, model: torch.nn.Module, *, on_gpu: bool) -> Measured:
    """Warm up, then look at the clock, at the memory and at the kernels, in rounds of their own."""
    contestant.steps(2)
    once = contestant.steps(1)
    rounds, steps = (ROUNDS, max(1, min(MOST_STEPS, round(ROUND_S / once)))) if on_gpu else (2, 1)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = tuple(contestant.steps(steps) for _ in range(rounds))
    return Measured(
        seconds=seconds,
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else 0,
        idle=profiled_idle(contestant) if on_gpu else None,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def profiled_idle(contestant: Contestant) -> float | None:
    """Return the idle time of some steps, whose kernels the profiler records; its own host time is
    counted as idle too."""
    with profile(activities=[ProfilerActivity.CUDA]):
        contestant.steps(1)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        contestant.steps(PROFILED)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        found.export_chrome_trace(str(file))
        return idle_share(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])


def idle_share(events: Iterable[Mapping[str, Any]]) -> float | None:
    """1 - (time in which anything runs on the device) / (from the first beginning to the last end);
    None if nothing ran."""
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in _WORK
    )
    if not spans:
        return None
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - spans[0][0])
