"""Sums of gradients in two levels beside the flat ring, over a slow link between two hosts that are
network namespaces of this machine.

Run as root: python ci/benchmarks/two_level.py [--mbit 400] [--mb 16] [--rounds 5]

Four replicas, two a host. Flat: gloo's all-reduce over all four. Two levels
(``data_parallel_replicas=2``): reduce-scatter inside, all-reduce of the parts between, all-gather
inside; with and without bfloat16 between the hosts. Before anything is timed, the sums are
compared."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import compare, report
from hosts import HOSTS, INIT_METHOD, start
from torch import Tensor

from lightning_ptdp.data_parallel.reduction import Reduction
from lightning_ptdp.world.mesh import Group

LOCAL = 2


def seconds(step: Callable[[Tensor], None], buffer: Tensor) -> float:
    """One sum, of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    step(buffer)
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def worker(rank: int, options: argparse.Namespace) -> None:
    """One replica."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=INIT_METHOD, rank=rank, world_size=HOSTS * LOCAL)
    pairs = [tuple(range(host * LOCAL, (host + 1) * LOCAL)) for host in range(HOSTS)]
    inner = [Group(dist.new_group(list(ranks)), ranks, rank % LOCAL) for ranks in pairs][
        rank // LOCAL
    ]
    across = [tuple(range(place, HOSTS * LOCAL, LOCAL)) for place in range(LOCAL)]
    outer = [Group(dist.new_group(list(ranks)), ranks, rank // LOCAL) for ranks in across][
        rank % LOCAL
    ]
    kinds = {
        "two levels": Reduction(inner=inner, outer=outer),
        "two levels, bfloat16 between": Reduction(
            inner=inner, outer=outer, outer_dtype=torch.bfloat16
        ),
    }
    buffer = torch.randn(options.mb * 2**18, generator=torch.Generator().manual_seed(rank))
    expected = buffer.clone()
    dist.all_reduce(expected)
    for name, reduction in kinds.items():
        found = buffer.clone()
        reduction.prepare(found).wait()
        # bfloat16 rounds by at most 2^-9: two sums inside the hosts and the sum of both, none of
        # them above 10.
        tolerance = 1e-5 if reduction.outer_dtype is None else 3 * 2**-9 * 10
        assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance), name
    flat: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        flat.append(seconds(dist.all_reduce, buffer.clone()))
        for name, reduction in kinds.items():
            times[name].append(seconds(lambda x, r=reduction: r.prepare(x).wait(), buffer.clone()))
    if rank == 0:
        print(
            f"flat: {options.mb * 8 / statistics.median(flat):.0f} Mbit/s of summed buffer over a "
            f"link of {options.mbit} Mbit/s"
        )
        rows = [
            compare(
                name=f"{options.mb} MiB, {options.mbit} Mbit/s, {name}",
                ours=values,
                peer=flat,
                peer_name="gloo's flat all-reduce",
                unit="s",
            )
            for name, values in times.items()
        ]
        report("Two-level sums over a slow link", rows)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the replicas."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=int, default=400, help="of the link between the hosts")
    parser.add_argument("--mb", type=int, default=16, help="size of the buffer in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    start(parser, worker, local=LOCAL, mb=1)


if __name__ == "__main__":
    main()
