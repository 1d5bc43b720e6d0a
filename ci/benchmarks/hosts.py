"""Hosts that are network namespaces of this machine: two that a slow link joins, a veth pair that
``tc tbf`` limits in both directions, or one with a slow interface."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from harness import parse_options

__all__ = ["HOSTS", "INIT_METHOD", "NoHosts", "run_alone", "run_on_hosts", "start"]

HOSTS = 2
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
) -> None:
    """Handle the command line of a benchmark over a slow link: start itself once a rank, or run one
    rank; ``parser`` has ``--mbit``."""
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parse_options(parser, rounds=1)
    if options.worker is not None:
        worker(options.worker, options)
        return
    try:
        run_on_hosts(sys.argv[0], sys.argv[1:], mbit=options.mbit, local=local)
    except NoHosts as error:
        sys.exit(str(error))


def run_on_hosts(script: str, arguments: Sequence[str], *, mbit: int, local: int) -> None:
    """Run ``script`` with ``arguments`` and ``--worker RANK`` once a rank, and wait for all.

    Args:
        script: A Python file.
        arguments: Its own.
        mbit: Of the link, in Mbit/s.
        local: Ranks a host; inside of one they speak over the loopback interface of its namespace.

    Raises:
        NoHosts: They cannot be made here.
    """
    names = [f"ptdp-{os.getpid()}-{host}" for host in range(HOSTS)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        _make(names, mbit)
        for rank in range(HOSTS * local):
            host = rank // local
            command = [
                "ip",
                "netns",
                "exec",
                names[host],
                sys.executable,
                script,
                *arguments,
                "--worker",
                str(rank),
            ]
            ranks.append(
                subprocess.Popen(command, env={**os.environ, "GLOO_SOCKET_IFNAME": f"ptdp{host}"})
            )
        codes = [rank.wait(timeout=600) for rank in ranks]
        if any(codes):
            sys.exit(f"the ranks ended with {codes}")
    finally:
        for process in ranks:
            process.kill()
        for name in names:
            _shell(f"ip netns delete {name}", check=False)


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
