"""Hosts that are network namespaces of this machine: two that a slow link joins, a veth pair that
``tc tbf`` limits in both directions, or one with a slow interface."""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkProcess

from harness import parse_options

__all__ = ["HOSTS", "INIT_METHOD", "NoHosts", "run_alone", "run_on_hosts", "start"]

HOSTS = 2
_CLONE_NEWNET = 0x40000000  # sched.h
_ADDRESSES = [f"10.213.7.{host + 1}" for host in range(HOSTS)]
INIT_METHOD = f"tcp://{_ADDRESSES[0]}:29713"
"""Address at which the ranks meet."""


class NoHosts(Exception):
    """Namespaces cannot be made here: root, ip and tc are needed."""


def start(
    parser: argparse.ArgumentParser,
    worker: Callable[[int, argparse.Namespace], None],
    *,
    local: int,
    **smoke: object,
) -> None:
    """Handle the command line of a benchmark over a slow link, and run its ranks; ``parser`` has
    ``--mbit``."""
    try:
        run_on_hosts(worker, parse_options(parser, rounds=1, **smoke), local=local)
    except NoHosts as error:
        sys.exit(str(error))


def run_on_hosts(
    worker: Callable[[int, argparse.Namespace], None], options: argparse.Namespace, *, local: int
) -> None:
    """Call ``worker(rank, options)`` in a forked process for each rank, and wait for all.

    Args:
        worker: Work of a rank.
        options: Its options; ``mbit`` is the rate of the link in Mbit/s.
        local: Ranks a host; inside of one they speak over the loopback interface of its namespace.

    Raises:
        NoHosts: They cannot be made here.
    """
    names = [f"ptdp-{os.getpid()}-{host}" for host in range(HOSTS)]
    context = multiprocessing.get_context("fork")
    ranks: list[ForkProcess] = []
    try:
        _make(names, options.mbit)
        for rank in range(HOSTS * local):
            host = rank // local
            process = context.Process(
                target=_on_host, args=(host, names[host], worker, rank, options)
            )
            process.start()
            ranks.append(process)
        for process in ranks:
            process.join(timeout=600)
        codes = [process.exitcode for process in ranks]
        if any(code != 0 for code in codes):
            sys.exit(f"the ranks ended with {codes}")
    finally:
        for process in ranks:
            process.kill()
        for name in names:
            _shell(f"ip netns delete {name}", check=False)


def _on_host(
    host: int,
    name: str,
    worker: Callable[[int, argparse.Namespace], None],
    rank: int,
    options: argparse.Namespace,
) -> None:
    with open(f"/run/netns/{name}", "rb") as namespace:
        # os.setns needs Python 3.12
        if ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET):
            sys.exit(f"rank {rank} cannot enter the namespace {name}")
    os.environ["GLOO_SOCKET_IFNAME"] = f"ptdp{host}"
    worker(rank, options)


def run_alone(script: str, arguments: Sequence[str], *, mbit: int) -> None:
    """Run ``script`` on a host whose loopback interface has ``mbit`` Mbit/s.

    Raises:
        NoHosts: The host cannot be made here.
    """
    name = f"ptdp-{os.getpid()}"
    try:
        with _explained():
            _shell(f"ip netns add {name}")
            _shell(f"ip netns exec {name} ip link set lo up")
            _shell(f"ip netns exec {name} {_limit('lo', mbit)}")
        command = ["ip", "netns", "exec", name, sys.executable, script, *arguments]
        subprocess.run(command, check=True, timeout=600)
    finally:
        _shell(f"ip netns delete {name}", check=False)


def _limit(device: str, mbit: int) -> str:
    return f"tc qdisc add dev {device} root tbf rate {mbit}mbit burst 256kb latency 200ms"


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        details = getattr(error, "stderr", "") or ""
        raise NoHosts(
            f"namespaces cannot be made here (root, ip and tc are needed): {error} {details}"
        ) from error


def _make(names: Sequence[str], mbit: int) -> None:
    with _explained():
        for name in names:
            _shell(f"ip netns add {name}")
        _shell(f"ip link add ptdp0 netns {names[0]} type veth peer name ptdp1 netns {names[1]}")
        for host, (name, address) in enumerate(zip(names, _ADDRESSES, strict=True)):
            inside = f"ip netns exec {name}"
            _shell(f"{inside} ip address add {address}/24 dev ptdp{host}")
            _shell(f"{inside} ip link set ptdp{host} up")
            _shell(f"{inside} ip link set lo up")
            _shell(f"{inside} {_limit(f'ptdp{host}', mbit)}")


def _shell(command: str, *, check: bool = True) -> None:
    try:
        subprocess.run(command.split(), check=check, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        if check:
            raise
