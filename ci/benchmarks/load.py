"""Loading a Hugging Face folder, each rank its part, beside reading the files: time, and the most
memory that a rank has.

    python ci/benchmarks/load.py [--mb 200] [--rounds 3] [--folder DIR] [--cold] [-t 2] [-p 2]

A Llama of random bfloat16 weights of about that many MB is written in several files, unless DIR
holds one. Ours is what
``Trainer.validate`` does before its first batch: headers, layout, values. The peer is as many
processes that read the same bytes once, each its share, a MiB at a time, with and without keeping
them in memory. Files are in the page cache (warm); with --cold each turn begins with files that
were dropped from it.

A ratio below 1 means that ours is faster, or smaller.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import transformers
from harness import QUIET, Comparison, compare, parse_options, report

from lightning_ptdp import LitCausalLM, PTDPStrategy
from lightning_ptdp.strategy import setup_hooks
from lightning_ptdp.strategy.restoring import load_initial_weights

PIECE = 1 << 20


def main() -> None:
    """Write the model, run the ranks, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mb", type=int, default=200, help="size of the model's files in MB (default 200)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="repetitions, ours and the peer in turn (default 3)"
    )
    parser.add_argument(
        "--folder", help="a model's folder, or where to write one (default: a temporary folder)"
    )
    parser.add_argument(
        "--cold", action="store_true", help="drop the files from the page cache before each turn"
    )
    parser.add_argument("-t", type=int, default=2, help="tensor_parallel_size (default 2)")
    parser.add_argument("-p", type=int, default=2, help="pipeline_parallel_size (default 2)")
    options = parse_options(parser, mb=3, rounds=1, t=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = (
            options.folder
            if options.folder and Path(options.folder, "config.json").exists()
            else f"{scratch}/model"
        )
        if not Path(folder).exists():
            _write(Path(folder), options.mb)
        context = multiprocessing.get_context("fork")  # with what was imported
        results: Any = context.SimpleQueue()
        size = options.t * options.p
        processes = [
            context.Process(
                target=_rank, args=(rank, size, folder, f"{scratch}/store", options, results)
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        found = [results.get() for _ in processes]
        for process in processes:
            process.join()
        total = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    times = max(found, key=lambda one: one["work"])
    peak = max(one["peak"] for one in found)
    print(
        f"read: {total / statistics.median(times['peer']) / 1e9:.2f} GB/s",
        "cold" if options.cold else "warm",
    )
    part = total / size / 1e6
    reads, keeps = f"{size} processes that read", f"{size} processes that read and keep it"
    rows: list[Comparison] = [
        compare(
            name="layout and values",
            ours=times["ours"],
            peer=times["peer"],
            peer_name=reads,
            unit="s",
        ),
        compare(name="values", ours=times["values"], peer=times["peer"], peer_name=reads, unit="s"),
        compare(name="values", ours=times["values"], peer=times["kept"], peer_name=keeps, unit="s"),
        compare(
            name="values, work of a rank",
            ours=times["work"],
            peer=times["kept work"],
            peer_name=keeps,
            unit="CPU s",
        ),
        compare(
            name="most memory of a rank",
            ours=[peak],
            peer=[part],
            peer_name=f"1/{size} of the files",
            unit="MB",
        ),
        compare(
            name="above its part",
            ours=[peak - part],
            peer=[300],
            peer_name="what is allowed",
            unit="MB",
        ),
    ]
    report(f"loading {total / 1e6:.0f} MB, t={options.t} p={options.p}", rows)


def _write(folder: Path, megabytes: int) -> None:
    width = 64 if megabytes < 10 else 1024 if megabytes < 1000 else 2048
    layer = 2 * (4 * width**2 + 3 * width * 4 * width)
    vocabulary = 16000
    layers = max(4, round((megabytes * 1e6 - 4 * vocabulary * width) / layer))
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=vocabulary,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="300MB")


class _Timed(PTDPStrategy):
    """The strategy, and when it began and ended to lay the model out and to fill it."""

    def _parallelize(self) -> None:
        dist.barrier()
        self.began = time.perf_counter()
        with mock.patch.object(setup_hooks, "load_initial_weights", self._fill):
            super()._parallelize()
        self.work = time.process_time() - self.worked
        dist.barrier()
        self.ended = time.perf_counter()

    def _fill(self, *arguments: Any) -> None:
        dist.barrier()
        self.filling, self.worked = time.perf_counter(), time.process_time()
        load_initial_weights(*arguments)


def _rank(
    rank: int, size: int, folder: str, store: str, options: argparse.Namespace, results: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    files = sorted(Path(folder).glob("*.safetensors"))
    found: dict[str, Any] = {
        key: [] for key in ("ours", "values", "work", "peer", "kept", "kept work")
    } | {"peak": 0.0}
    for number in range(options.rounds + 1):
        row: dict[str, float] = {}
        for key, keeps in (("peer", False), ("kept", True)):
            _drop(files, options.cold, rank)
            began, worked = time.perf_counter(), time.process_time()
            _read(files, rank, size, keeps)
            row["kept work"] = time.process_time() - worked
            dist.barrier()
            row[key] = time.perf_counter() - began
        _drop(files, options.cold, rank)
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the highest from now on
        strategy = _Timed(tensor_parallel_size=options.t, pipeline_parallel_size=options.p)
        trainer = pl.Trainer(
            strategy=strategy, accelerator="cpu", devices=size, limit_val_batches=0, **QUIET
        )
        trainer.validate(LitCausalLM(folder, dtype="bfloat16"), [0], verbose=False)
        row |= {
            "ours": strategy.ended - strategy.began,
            "values": strategy.ended - strategy.filling,
            "work": strategy.work,
        }
        if number:  # the first round makes connections
            found["peak"] = max(found["peak"], _memory("VmHWM") - before)
            for key, value in row.items():
                found[key].append(value)
        del trainer, strategy
    results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _read(files: list[Path], rank: int, size: int, keeps: bool) -> None:
    """This rank's share of every file."""
    piece = memoryview(bytearray(PIECE))
    for file in files:
        share = -(-file.stat().st_size // size)
        kept = memoryview(torch.empty(share if keeps else 0, dtype=torch.uint8).numpy())
        with open(file, "rb", buffering=0) as stream:
            for begin in range(0, share, PIECE):
                target = kept[begin : begin + PIECE] if keeps else piece[: share - begin]
                os.preadv(stream.fileno(), [target], rank * share + begin)


def _drop(files: list[Path], cold: bool, rank: int) -> None:
    for file in files if cold and rank == 0 else ():
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


def _memory(key: str) -> float:
    """MB of this process."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
