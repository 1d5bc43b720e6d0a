"""A checkpoint in object storage, beside plain parallel transfers of the same objects, in turns.

    python ci/benchmarks/object_storage.py [--rounds 5] [--mb 256] [--mbit 1000]

The server is moto's, in a process of its own on this machine, and competes for its cores. With
``--mbit`` both run on a host of their own (a network namespace) with a link of that rate, which is
then the limit, as it is for a store elsewhere. The peer is ``S3FileSystem.pipe`` and
``cat``, which transfer all objects at a time. Ours also sums and checks every block, and asks which
objects are there. The last row has bytes: another layout (half of each tensor) beside the bytes of
that half.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import s3fs
import torch
from harness import compare, parse_options, report
from hosts import run_alone

from lightning_ptdp.checkpoint import TensorReader, save_checkpoint
from lightning_ptdp.checkpoint.remote_path import RemotePath
from lightning_ptdp.parameters.placement import Placement

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.checkpoint.s3_server import serving

ROOT = RemotePath("s3://bucket")


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    """Start the server, transfer in turns, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--mbit", type=int, default=0, help="rate of the link; 0: none")
    options = parse_options(parser, rounds=1, mb=4)
    if options.mbit:
        arguments = [f"--rounds={options.rounds}", f"--mb={options.mb}"]
        run_alone(__file__, arguments, mbit=options.mbit)
        return
    rows = min(options.mb * 64, 2048)  # of 16 KiB
    count = options.mb * 64 // rows
    values = {f"model/{number}": torch.randn(rows, 4096) for number in range(count)}
    tensors = {
        name: (value, Placement.replicated(tuple(value.shape))) for name, value in values.items()
    }
    path = ROOT / "ours.ckpt"
    times: dict[str, list[float]] = {name: [] for name in ("save", "pipe", "load", "cat")}
    with serving() as server:
        store = s3fs.S3FileSystem()

        def save() -> None:
            save_checkpoint(path, tensors=tensors, state={}, metadata={})

        def load() -> None:
            TensorReader(path).read_all(values)

        save()
        objects = {f"bucket/peer/{name}": store.cat_file(f"{path}/{name}") for name in path.below()}
        transfers = {
            "save": save,
            "pipe": lambda: store.pipe(objects),
            "load": load,
            "cat": lambda: store.cat(list(objects)),
        }
        for turn in range(options.rounds + 1):
            for name in list(transfers) if turn % 2 else list(reversed(transfers)):
                if name == "cat" and not turn:
                    store.pipe(objects)
                seconds = _seconds(transfers[name])
                if turn:
                    times[name].append(seconds)
        server.requests()
        reader = TensorReader(path)
        for name in values:
            reader.read(name, offset=(0, 2048), shape=(rows, 2048))
        fetched = sum(request["sent"] for request in server.requests())
    needed = sum(value.nbytes for value in values.values()) / 2
    report(
        f"Object storage, {options.mb} MiB",
        [
            compare(
                name=name, ours=times[ours], peer=times[peer], peer_name=f"s3fs {peer}", unit="s"
            )
            for name, ours, peer in (("save", "save", "pipe"), ("load", "load", "cat"))
        ]
        + [
            compare(
                name="bytes fetched for half of each tensor",
                ours=[fetched / 1e6],
                peer=[needed / 1e6],
                peer_name="its bytes",
                unit="MB",
            )
        ],
    )


if __name__ == "__main__":
    main()
