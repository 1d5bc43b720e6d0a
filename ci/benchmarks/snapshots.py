"""Steps with a snapshot in memory after each, beside the same steps without, in turns.

    python ci/benchmarks/snapshots.py [--rounds 5] [--steps 4] [--size "50 M"]

The GPT and the two processes of ``data_parallel.py``. A snapshot holds the weights and both states
of AdamW. It is copied when a step ends, and written to ``/dev/shm`` beside the next one. A ratio of
1.03 means that snapshots cost 3 % of a step.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from data_parallel import BATCH, SIZES, in_trainer
from harness import compare, parse_options, report

from lightning_ptdp import PTDPStrategy


def worker(rank: int, folder: str, size: str, rounds: int, steps: int, results: Any) -> None:
    """Train as one of two ranks; rank 0 reports the seconds of a step."""
    warnings.filterwarnings("ignore")
    os.chdir(folder)  # the Trainer's folder, with the link to the snapshots
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    config = SIZES[size]
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randint(
        0, config.vocabulary_size, (BATCH, config.sequence_length + 1), generator=generator
    )
    plain = PTDPStrategy(checkpoint_format="folder")
    taking = PTDPStrategy(snapshot_every_n_steps=1)
    engines = [in_trainer(config, batch, lambda: taking), in_trainer(config, batch, lambda: plain)]
    times: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for index in (0, 1) if turn % 2 else (1, 0):
            seconds = engines[index].steps(steps)
            if turn:  # the first turn warms up
                times[index].append(seconds)
    taking.remove_snapshots()
    if rank == 0:
        results.put(times)
    dist.barrier()
    os._exit(0)  # the Trainers' threads wait for a turn that does not come


def main() -> None:
    """Run the ranks and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--size", default="50 M", choices=SIZES)
    options = parse_options(parser, rounds=1, steps=1, size="10 M")
    results = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, options.size, options.rounds, options.steps, results)
        mp.start_processes(worker, arguments, nprocs=2, start_method="fork")
    ours, peer = results.get()
    row = compare(
        name=f"step, {options.size}", ours=ours, peer=peer, peer_name="no snapshots", unit="s"
    )
    report("Snapshots after every step, d = 2", [row])


if __name__ == "__main__":
    main()
