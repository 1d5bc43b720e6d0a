"""Checkpoints beside plain ``torch.save`` and ``torch.load`` of the same bytes to the same disk.

    python ci/benchmarks/checkpoint.py [--mb 512] [--ranks 2] [--rounds 5] [--folder DIR]

- save and load: all ranks together, synced to the disk, checksums included; the peer is each rank's
  own ``torch.save`` (and fsync) or ``torch.load`` of the same tensors to a file of its own;
- the stall of an asynchronous save beside a save that is waited for;
- bytes read when another layout loads the checkpoint beside the bytes that it needs.

A ratio below 1 means that ours is faster, or reads less.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Comparison, compare, parse_options, report

from lightning_ptdp.checkpoint import BackgroundSaver, load_tensors, save_checkpoint
from lightning_ptdp.checkpoint.files import sync
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.tensor_parallel.tensor_shards import shard_columns

Tensors = dict[str, tuple[torch.Tensor, Placement]]
Times = dict[str, list[float]]


def main() -> None:
    """Run the ranks and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mb",
        type=int,
        default=512,
        help="size of the checkpoint in MB, all ranks together (default 512)",
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="tensor-parallel ranks that save (default 2)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="repetitions, ours and the peer in turn (default 5)"
    )
    parser.add_argument(
        "--width", type=int, default=1024, help="width of the matrices (default 1024)"
    )
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    options = parse_options(parser, mb=1, width=128, rounds=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        context = multiprocessing.get_context("fork")
        results: Any = context.SimpleQueue()
        processes = [
            context.Process(
                target=_rank,
                args=(rank, options, folder, results),
            )
            for rank in range(options.ranks)
        ]
        for process in processes:
            process.start()
        times = results.get()
        for process in processes:
            process.join()
        size = _layers(options) * _layer_bytes(options)
        rows = _rows(times, size, options.ranks) + _reads(Path(folder), options)
    report(f"checkpoint of {size / 1e6:.0f} MB on {options.ranks} ranks", rows)


def model(options: argparse.Namespace, size: int, rank: int) -> Tensors:
    """Matrices as a transformer's blocks have them, cut for tensor-parallel rank ``rank`` of
    ``size``."""
    width = options.width
    found: Tensors = {}
    for layer in range(_layers(options)):
        for name, shape, columns in (
            ("up", (4 * width, width), True),
            ("down", (width, 4 * width), False),
        ):
            cut = (
                shard_columns(shape, parts=[shape[0]], size=size, index=rank)
                if columns
                else shard_columns(shape, parts=shape[1:], size=size, index=rank, dim=1)
            )
            found[f"model/{layer}.{name}"] = (torch.randn(cut.local_shape), cut)
    return found


def _layer_bytes(options: argparse.Namespace) -> int:
    return 2 * 4 * options.width * options.width * 4


def _layers(options: argparse.Namespace) -> int:
    return max(1, options.mb * 10**6 // _layer_bytes(options))


def _rank(rank: int, options: argparse.Namespace, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks
    )
    tensors = model(options, options.ranks, rank)
    plain = {name: tensor for name, (tensor, _) in tensors.items()}
    peer, ours = Path(folder) / f"peer-{rank}.pt", Path(folder) / "ours"
    saver = BackgroundSaver(limit=timedelta(minutes=10))

    def save_peer() -> None:
        with open(peer, "wb") as stream:
            torch.save(plain, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def stall() -> None:
        saver.save(ours, tensors=tensors, state={}, metadata={}, then=lambda: None)

    steps: dict[str, Callable[[], object]] = {
        "save": lambda: save_checkpoint(ours, tensors=tensors, state={}, metadata={}),
        "save, peer": save_peer,
        "stall": stall,
        "load": lambda: load_tensors(ours, tensors),
        "load, peer": lambda: torch.load(peer, weights_only=True),
    }
    times: Times = {name: [] for name in steps}
    for number in range(options.rounds + 1):
        for name, step in steps.items():
            for path in (ours, peer) if name.startswith("save") else ():
                # What is there is removed outside of the measurement.
                if rank == 0 or path == peer:
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(
                        missing_ok=True
                    )
                save_peer() if name == "save" and path == peer else None
            if name.startswith("save"):
                sync(Path(folder))  # nobody pays for what was removed
            dist.barrier()
            began = time.perf_counter()
            step()
            if name != "stall":
                dist.barrier()
            taken = time.perf_counter() - began
            saver.wait()
            if number:  # the first round fills caches and makes the copies' memory
                times[name].append(taken)
    if rank == 0:
        results.put(times)
    dist.barrier()
    dist.destroy_process_group()


def _rows(times: Times, size: int, ranks: int) -> list[Comparison]:
    for name in ("save", "save, peer", "load", "load, peer"):
        print(f"{name}: {size / sorted(times[name])[len(times[name]) // 2] / 1e9:.2f} GB/s")
    return [
        compare(
            name="save",
            ours=times["save"],
            peer=times["save, peer"],
            peer_name=f"torch.save on {ranks} ranks",
            unit="s",
        ),
        compare(
            name="load",
            ours=times["load"],
            peer=times["load, peer"],
            peer_name=f"torch.load on {ranks} ranks",
            unit="s",
        ),
        compare(
            name="stall of async_save",
            ours=times["stall"],
            peer=times["save"],
            peer_name="the same save, waited for",
            unit="s",
        ),
    ]


def _reads(folder: Path, options: argparse.Namespace) -> list[Comparison]:
    """Bytes that the ranks of other layouts read, as the kernel counts them, beside those that they
    hold."""
    rows = []
    for size in (1, 2 * options.ranks):
        read = needed = 0
        for rank in range(size):
            tensors = model(options, size, rank)
            before = _bytes_read()
            load_tensors(folder / "ours", tensors)
            read += _bytes_read() - before
            needed += sum(tensor.nbytes for tensor, _ in tensors.values())
        name = f"bytes read, {options.ranks} ranks' checkpoint on {size}"
        rows.append(
            compare(
                name=name,
                ours=[read / 1e6],
                peer=[needed / 1e6],
                peer_name="bytes needed",
                unit="MB",
            )
        )
    return rows


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


if __name__ == "__main__":
    main()
