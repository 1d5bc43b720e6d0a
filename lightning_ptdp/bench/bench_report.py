"""Tables of benchmark results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_ptdp.base.columns import columns
from lightning_ptdp.bench.result import BenchResult

__all__ = ["ranked", "render", "table"]


def render(one: BenchResult) -> str:
    """Return a table with one number per line."""
    return columns(list(_rows(one)), words=(0,))


def ranked(results: Sequence[BenchResult]) -> list[BenchResult]:
    """Return the results, the fastest first, by samples per second.

    Steps may differ in size."""
    return sorted(results, key=lambda one: one.median_s / one.samples)


def table(results: Sequence[BenchResult]) -> str:
    """Return a table with one layout per line, in the given order.

    It contains the planner's estimate and the layout's rank by that estimate."""
    expected = [one.predicted_s / one.samples if one.predicted_s else None for one in results]
    order = sorted(seconds for seconds in expected if seconds is not None)
    rows = [
        (
            "",
            "layout",
            "m",
            "step",
            "p10 to p90",
            "tokens/s",
            "MFU",
            "slower by",
            "planner",
            "rank",
            "bubble",
            "memory GiB",
        )
    ]
    for place, (one, seconds) in enumerate(zip(results, expected, strict=True), 1):
        slower = one.median_s / one.samples / (results[0].median_s / results[0].samples) - 1
        rows.append(
            (
                str(place),
                one.layout,
                str(one.num_microbatches),
                _ms(one.median_s),
                _spread(one),
                _tokens(one),
                _percent(one.mfu),
                f"{slower:.0%}" if place > 1 else "-",
                "-" if one.predicted_s is None else _ms(one.predicted_s),
                "-" if seconds is None else str(order.index(seconds) + 1),
                _percent(one.bubble),
                _memory(one),
            )
        )
    first = results[0]
    step = (
        f"{first.samples} samples, {first.tokens:,} tokens"
        if len({one.samples for one in results}) == 1
        else "of varying size"
    )
    return f"{_devices(first)}; a step: {step}\n\n{columns(rows, words=(1,))}"


def _rows(one: BenchResult) -> Iterator[tuple[str, str]]:
    yield "layout", f"{one.layout} m{one.num_microbatches}"
    yield "devices", _devices(one)
    yield "step", f"{one.samples} samples, {one.tokens:,} tokens"
    yield "step time, median", _ms(one.median_s)
    yield "p10 to p90", _spread(one)
    yield (
        "planner's estimate",
        "-" if one.predicted_s is None else f"{_ms(one.predicted_s)} ({one.predicted_by})",
    )
    yield "tokens/s", _tokens(one)
    yield "model TFLOP/s per device", f"{one.flops_per_s / 1e12:.4g}" if one.flops else "-"
    yield "MFU", _percent(one.mfu)
    yield "peak memory, by rank", f"{_memory(one)} GiB"
    if one.predicted_bytes is not None:
        yield "planner's estimate, fullest rank", f"{one.predicted_bytes / 2**30:.2f} GiB"
    if one.bubble is not None:
        yield "bubble, measured", _percent(one.bubble)
        yield "bubble of the schedule", _percent(one.ideal_bubble)


def _devices(one: BenchResult) -> str:
    return f"{one.world_size} x {one.device}, {one.precision}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _spread(one: BenchResult) -> str:
    return f"{one.percentile_s(10) * 1e3:.1f} to {_ms(one.percentile_s(90))}"


def _tokens(one: BenchResult) -> str:
    return f"{one.tokens_per_s:,.0f}" if one.tokens else "-"


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"


def _memory(one: BenchResult) -> str:
    gib = [f"{peak / 2**30:.2f}" for peak in one.peak_memory_bytes]
    return " ".join(gib) if len(gib) <= 4 else f"{min(gib, key=float)} to {max(gib, key=float)}"
