"""Memory of a long training: gpt/nano with t = 2, p = 2, v = 2, each rank's resident memory.

    python ci/benchmarks/long.py [--steps 2000] [--figure FILE]

A row compares a rank's memory at the end with the same rank's after a tenth of the steps, when all
buffers exist: the median of a hundredth of the steps each. A ratio of 1 means that the rank does
not grow. ``--figure`` draws the memory over the steps and needs matplotlib.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from harness import TINY_TEXT, Comparison, parse_options, report, run_ptdp


class ResidentMemory(L.Callback):
    """Write the process's resident memory after each step, in pages, to a file for each rank.

    Args:
        folder: Folder of the files.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
        path = self._folder / f"{trainer.global_rank}.txt"
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{pages}\n")


def train(steps: int, folder: str, more: list[str]) -> list[list[float]]:
    """Train in processes of their own, with ``more`` options; return the MiB after each step, for
    each rank."""
    command = ["fit", "--config", "gpt/nano"]
    changes = [
        f"--trainer.max_steps={steps}",
        "--trainer.callbacks+=long.ResidentMemory",
        f"--trainer.callbacks.folder={folder}",
        "--trainer.logger=false",
        "--trainer.enable_progress_bar=false",
        "--sample=null",
    ]
    run_ptdp([*command, *changes, *more], Path(folder))
    page = os.sysconf("SC_PAGE_SIZE") / 2**20
    files = sorted(Path(folder).glob("?.txt"))
    return [[int(line) * page for line in file.read_text().split()] for file in files]


def draw(memory: list[list[float]], path: str) -> None:
    """Draw the memory of each rank over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="resident memory (MiB)")
    for rank, values in enumerate(memory):
        axes.plot(values, label=f"rank {rank}", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Train, compare and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--figure", help="image file to write")
    options = parse_options(parser, steps=2)
    with tempfile.TemporaryDirectory() as folder:
        memory = train(options.steps, folder, TINY_TEXT if options.smoke else [])
    if options.figure:
        draw(memory, options.figure)
    span = max(1, options.steps // 100)
    rows = []
    for rank, values in enumerate(memory):
        first = options.steps // 10
        early, late = (statistics.median(v) for v in (values[first : first + span], values[-span:]))
        rows.append(
            Comparison(
                name=f"resident memory of rank {rank}, step {options.steps}",
                ours=late,
                peer=early,
                peer_name=f"the same rank, step {first}",
                ratio=late / early,
                unit="MiB",
            )
        )
    report("A long training, gpt/nano t=2 p=2 v=2", rows)


if __name__ == "__main__":
    main()
