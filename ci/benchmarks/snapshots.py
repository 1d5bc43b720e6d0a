"""Steps with a snapshot in memory after each, beside the same steps without, in turns.

    python ci/benchmarks/snapshots.py [--rounds 5] [--steps 4] [--size "50 M"]

The GPT and the two processes of ``data_parallel.py``. A snapshot holds the weights and both states
of AdamW. It is copied when a step ends, and written to ``/dev/shm`` beside the next one. A ratio of
1.03 means that snapshots cost 3 % of a step.
"""

from __future__ import annotations

import argparse
import os

import torch
from data_parallel import BATCH, SIZES, in_trainer
from harness import compare, parse_options, report
from turns import alternate, on_ranks

from lightning_ptdp import PTDPStrategy


def measure(rank: int, folder: str, size: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of a step."""
    os.chdir(folder)  # the Trainer's folder, with the link to the snapshots
    config = SIZES[size]
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randint(
        0, config.vocabulary_size, (BATCH, config.sequence_length + 1), generator=generator
    )
    plain = PTDPStrategy(checkpoint_format="folder")
    taking = PTDPStrategy(snapshot_every_n_steps=1)
    engines = {
        "snapshots": in_trainer(config, batch, lambda: taking),
        "none": in_trainer(config, batch, lambda: plain),
    }
    times = alternate(engines, rounds=rounds, steps=steps, ours=engines)
    taking.snapshots.remove()
    return times


def main() -> None:
    """Run the ranks and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--size", default="50 M", choices=SIZES)
    options = parse_options(parser, rounds=1, steps=1, size="tiny")
    times = on_ranks(measure, options.size, options.rounds, options.steps)
    row = compare(
        name=f"step, {options.size}",
        ours=times["snapshots"],
        peer=times["none"],
        peer_name="no snapshots",
        unit="s",
    )
    report("Snapshots after every step, d = 2", [row])


if __name__ == "__main__":
    main()
