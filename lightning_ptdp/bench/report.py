"""Benchmarks as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_ptdp.bench.result import BenchResult
from lightning_ptdp.columns import columns

__all__ = ["render"]


def render(results: Sequence[BenchResult]) -> str:
    """A line a number and a column a layout; of several, the last line compares with the first."""
    return columns(list(_rows(results)), words=(0,))


def _rows(results: Sequence[BenchResult]) -> Iterator[tuple[str, ...]]:
    def row(name: str, cells: Iterator[str]) -> tuple[str, ...]:
        return name, *cells

    yield row("layout", (one.layout for one in results))
    yield row("devices", (f"{one.world_size} x {one.device}, {one.precision}" for one in results))
    yield row("step", (f"{one.samples} samples, {one.tokens:,} tokens" for one in results))
    yield row("step time, median", (f"{one.median_s * 1e3:.1f} ms" for one in results))
    yield row("p10 to p90", (f"{one.percentile_s(10) * 1e3:.1f} to {one.percentile_s(90) * 1e3:.1f} ms" for one in results))
    yield row("tokens/s", (f"{one.tokens_per_s:,.0f}" if one.tokens else "-" for one in results))
    yield row("model TFLOP/s a device", (f"{one.flops_per_s / 1e12:.4g}" if one.flops else "-" for one in results))
    yield row("MFU", ("-" if one.mfu is None else f"{one.mfu:.1%}" for one in results))
    yield row("peak memory, by rank", (_memory(one) for one in results))
    if any(one.bubble is not None for one in results):
        yield row("bubble, measured", ("-" if one.bubble is None else f"{one.bubble:.1%}" for one in results))
        yield row("bubble, ideal", ("-" if one.ideal_bubble is None else f"{one.ideal_bubble:.1%}" for one in results))
    if len(results) > 1 and all(one.tokens for one in results):
        yield row("speed, of the first", (f"{one.tokens_per_s / results[0].tokens_per_s:.2f}" for one in results))


def _memory(one: BenchResult) -> str:
    gib = [f"{peak / 2**30:.2f}" for peak in one.peak_memory_bytes]
    return f"{' '.join(gib)} GiB" if len(gib) <= 4 else f"{min(gib, key=float)} to {max(gib, key=float)} GiB"
