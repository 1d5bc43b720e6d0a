"""Common parts of the benchmarks: the machine's load, and a report for people and programs."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_ptdp.shims.glibc import Heap

__all__ = [
    "QUIET",
    "TINY_TEXT",
    "Comparison",
    "compare",
    "parse_options",
    "report",
    "run_ptdp",
    "usual_heap",
]

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}
"""A Trainer that does nothing but train."""

TINY_TEXT = [
    f"--data.source={Path(__file__).parent}",
    "--data.vocabulary_size=512",
    "--model.config.vocabulary_size=512",
    "--data.validation_samples=8",
    "--data.sequence_length=32",
    "--model.config.sequence_length=32",
    "--model.config.hidden_size=32",
]
"""Options of ``ptdp`` for a tiny model of a recipe, whose data are prepared within a second."""


def parse_options(parser: argparse.ArgumentParser, **smoke: object) -> argparse.Namespace:
    """Parse the command line; ``--smoke`` sets the options in ``smoke``, with which the benchmark
    only shows that it runs."""
    parser.add_argument(
        "--smoke", action="store_true", help="one tiny round, to see that the benchmark runs"
    )
    options = parser.parse_args()
    if options.smoke:
        vars(options).update(smoke)
    return options


def run_ptdp(arguments: Sequence[object], folder: Path) -> str:
    """Run ``ptdp`` in ``folder`` in a forked process, and return its output.

    A fork needs only the imports that this process does not have yet.
    """
    output = folder / "output.txt"
    run = multiprocessing.get_context("fork").Process(
        target=_run_ptdp, args=([*map(str, arguments)], folder, output)
    )
    run.start()
    run.join()
    text = output.read_text(encoding="utf-8")
    if run.exitcode:
        raise RuntimeError(f"ptdp {arguments[0]} exited with {run.exitcode}: {text}")
    return text


def _run_ptdp(arguments: list[str], folder: Path, output: Path) -> None:
    from lightning_ptdp.cli import main

    os.chdir(folder)
    with output.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
    sys.exit(main(arguments))


@contextmanager
def usual_heap() -> Iterator[None]:
    """Return a context for a peer in a process in which our strategy trains: the C library returns
    large blocks, as it does for the peer's users."""
    Heap().close()
    try:
        yield
    finally:
        Heap()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of ours beside a peer's; a ratio below 1 means that ours is faster or smaller."""

    name: str
    ours: float
    peer: float
    peer_name: str
    ratio: float
    unit: str


def compare(
    *, name: str, ours: Sequence[float], peer: Sequence[float], peer_name: str, unit: str
) -> Comparison:
    """Compare alternating samples by the median of their pairwise ratios, which slow drifts of the
    machine do not move."""
    ratio = statistics.median(a / b for a, b in zip(ours, peer, strict=True))
    return Comparison(
        name=name,
        ours=statistics.median(ours),
        peer=statistics.median(peer),
        peer_name=peer_name,
        ratio=ratio,
        unit=unit,
    )


def report(title: str, rows: Sequence[Comparison]) -> None:
    """Print a table, and as the last line the rows as JSON."""
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{title}   ({os.cpu_count()} cores, load {load})")
    print(f"{'what':<44}{'ours':>12}{'peer':>12}{'ratio':>9}  unit, peer")
    for row in rows:
        print(
            f"{row.name:<44}{row.ours:>12.4g}{row.peer:>12.4g}{row.ratio:>9.3f}  {row.unit}, "
            f"{row.peer_name}"
        )
    print(json.dumps([asdict(row) for row in rows]))
