"""Sums of gradients in two levels beside the flat ring, over a slow link between two hosts that are network namespaces of this machine.

Run as root: python ci/benchmarks/two_level.py [--mbit 400] [--mb 16] [--rounds 5]

Four replicas, two a host; a veth pair joins the hosts, and ``tc tbf`` limits it in both directions. Inside a host messages go over the
loopback interface of its namespace. Flat: gloo's all-reduce over all four. Two levels (``data_parallel_replicas=2``): reduce-scatter
inside, all-reduce of the parts between, all-gather inside; with and without bfloat16 between the hosts. Before anything is timed, the
sums are compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import compare, report
from torch import Tensor

from lightning_ptdp.data_parallel import Reduction
from lightning_ptdp.world.mesh import Group

HOSTS, LOCAL = 2, 2
NAMES = [f"ptdp-bench-{host}" for host in range(HOSTS)]
ADDRESSES = [f"10.213.7.{host + 1}" for host in range(HOSTS)]
PORT = 29713


def shell(command: str, *, check: bool = True) -> None:
    """Run a command of the network set-up."""
    subprocess.run(command.split(), check=check, capture_output=True, text=True, timeout=30)


def make_hosts(mbit: int) -> None:
    """Two namespaces with a limited link between them."""
    for name in NAMES:
        shell(f"ip netns add {name}")
    shell(f"ip link add ptdp0 netns {NAMES[0]} type veth peer name ptdp1 netns {NAMES[1]}")
    for host, (name, address) in enumerate(zip(NAMES, ADDRESSES, strict=True)):
        inside = f"ip netns exec {name}"
        shell(f"{inside} ip address add {address}/24 dev ptdp{host}")
        shell(f"{inside} ip link set ptdp{host} up")
        shell(f"{inside} ip link set lo up")
        shell(f"{inside} tc qdisc add dev ptdp{host} root tbf rate {mbit}mbit burst 256kb latency 200ms")


def remove_hosts() -> None:
    """Undo ``make_hosts``, or as much of it as was done."""
    for name in NAMES:
        shell(f"ip netns delete {name}", check=False)


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
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:{PORT}", rank=rank, world_size=HOSTS * LOCAL)
    pairs = [tuple(range(host * LOCAL, (host + 1) * LOCAL)) for host in range(HOSTS)]
    inner = [Group(dist.new_group(list(ranks)), ranks, rank % LOCAL) for ranks in pairs][rank // LOCAL]
    across = [tuple(range(place, HOSTS * LOCAL, LOCAL)) for place in range(LOCAL)]
    outer = [Group(dist.new_group(list(ranks)), ranks, rank // LOCAL) for ranks in across][rank % LOCAL]
    kinds = {
        "two levels": Reduction(inner=inner, outer=outer),
        "two levels, bfloat16 between": Reduction(inner=inner, outer=outer, outer_dtype=torch.bfloat16),
    }
    buffer = torch.randn(options.mb * 2**18, generator=torch.Generator().manual_seed(rank))
    expected = buffer.clone()
    dist.all_reduce(expected)
    for name, reduction in kinds.items():
        found = buffer.clone()
        reduction.prepare(found).wait()
        # bfloat16 rounds by at most 2^-9: two sums inside the hosts and the sum of both, none of them above 10.
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
            f"flat: {options.mb * 8 / statistics.median(flat):.0f} Mbit/s of summed buffer over a link of {options.mbit} Mbit/s"
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
    """Make the hosts, start the replicas, clean up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=400, help="of the link between the hosts")
    parser.add_argument("--mb", type=int, default=16, help="size of the buffer in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker, options)
        return
    remove_hosts()
    replicas: list[subprocess.Popen[bytes]] = []
    try:
        make_hosts(options.mbit)
        for rank in range(HOSTS * LOCAL):
            host = rank // LOCAL
            command = ["ip", "netns", "exec", NAMES[host], sys.executable, __file__, *sys.argv[1:], "--worker", str(rank)]
            replicas.append(subprocess.Popen(command, env={**os.environ, "GLOO_SOCKET_IFNAME": f"ptdp{host}"}))
        codes = [replica.wait(timeout=300) for replica in replicas]
        if any(codes):
            sys.exit(f"the replicas ended with {codes}")
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        details = getattr(error, "stderr", "") or ""
        sys.exit(f"two namespaces cannot be made here (root, ip and tc are needed): {error} {details}")
    finally:
        for replica in replicas:
            replica.kill()
        remove_hosts()


if __name__ == "__main__":
    main()
