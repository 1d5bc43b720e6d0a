"""Expected ranks and their nodes, and tests whether processes of this machine have ended.

The messages also say how to start missing ranks."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lightning_ptdp.base.errors import numbered


@dataclass(frozen=True, kw_only=True)
class ExpectedRanks:
    """Ranks of a world, as seen by one of them.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        address: Address of the store.
        port: Port of the store.
        num_nodes: Number of machines; each has the same number of ranks.
        started_by_hand: Whether the user starts a process on every node, instead of SLURM or
            torchrun.
        say_every_s: Seconds between two messages about a wait.
    """

    rank: int
    world_size: int
    address: str
    port: int
    num_nodes: int = 1
    started_by_hand: bool = False
    say_every_s: float = 10.0

    @property
    def where(self) -> str:
        """Return the store's address and port."""
        return f"{self.address}:{self.port}"

    @property
    def node_size(self) -> int:
        """Return the number of ranks of a machine."""
        return self.world_size // self.num_nodes

    @property
    def host(self) -> str:
        """Return a description of the rank that holds the store."""
        return f"rank 0 (or torchrun), which hosts the store at {self.where},"

    @property
    def watched(self) -> list[int]:
        """Return the ranks of this machine whose processes this rank watches.

        The first rank of a machine watches all other ranks of it. They watch the first rank."""
        first = self.rank // self.node_size * self.node_size
        if self.rank == first:
            return [rank for rank in range(first, first + self.node_size) if rank != self.rank]
        return [first]

    def missing(self, ranks: list[int]) -> str:
        """Return rank 0's message about ranks that have not joined."""
        if not ranks:
            return ""
        nodes = sorted({rank // self.node_size for rank in ranks})
        location = "" if self.num_nodes == 1 else f" on {numbered('node', nodes)}"
        joined = f"{self.world_size - len(ranks)} of {self.world_size} joined"
        return (
            f"for {numbered('rank', ranks)}{location}, "
            f"{joined}{self._how([node for node in nodes if node * self.node_size in ranks])}"
        )

    def first_of_all(self) -> str:
        """Return the message of a rank that waits for rank 0.

        Only rank 1 and the first rank of each node return one; other ranks return ""."""
        if self.rank != 1 and self.rank % self.node_size:
            return ""
        return f"for rank 0 at {self.where}{self._how([0])}"

    def unanswered(self, reached: bool) -> str:
        """Return the reason why the store, or rank 0 in it, does not answer."""
        if reached:
            return "rank 0 did not join"
        if self.rank:
            return f"{self.host} does not answer"
        return f"the store at {self.where} does not answer"

    def silent(self) -> str:
        """Return the reason that the store has stopped answering."""
        return f"{self.host} does not answer any more"

    def _how(self, nodes: list[int]) -> str:
        if not nodes or self.num_nodes == 1:
            return ""
        if not self.started_by_hand:
            return (
                "; check what should have started the processes of node "
                f"{', '.join(map(str, nodes))}"
            )
        variables = f"MASTER_ADDR={self.address} MASTER_PORT={self.port}"
        lines = [f"{variables} NODE_RANK={node} {shlex.join(sys.orig_argv)}" for node in nodes]
        hint = "" if not self.address.startswith(("127.", "localhost")) else _LOOPBACK_HINT
        return f"; start there: {' and '.join(lines)}{hint}"


_LOOPBACK_HINT = (
    " (MASTER_ADDR must be an address of node 0 that the other nodes can reach, and "
    "MASTER_PORT a free port there. Set both to the same values on all nodes)"
)


def this_process() -> str:
    """Return an identifier of this process and machine, for ``has_ended``."""
    return json.dumps([_machine(), os.getpid(), _started(os.getpid())])


def has_ended(process: str) -> bool:
    """Return True if a process of this machine has ended.

    The result is False for processes of other machines, whose state is unknown."""
    machine, pid, start_time = json.loads(process)
    return machine is not None and machine == _machine() and _started(pid) != start_time


@cache
def _machine() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(
            encoding="ascii"
        ).strip() + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return None


def _started(pid: int) -> str | None:
    """Return the start time of a process in ticks; None if it is gone, a zombie or dead."""
    try:
        state, *values = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        )
    except OSError:
        return None
    return None if state in "ZX" else values[18]
