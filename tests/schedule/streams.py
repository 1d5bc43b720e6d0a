"""Simulation of GPU streams by the rules of CUDA and NCCL, to find operations that hang.

- Operations of one stream run in order. An operation starts after all operations that it waits for
  have ended.
- A message or a collective ends when it has started on all its ranks: a send waits for its receive
  (rendezvous).
- A host issues operations without waiting for them, except for those that *hold* it. These are
  reads from the device, and the first use of a connection, which NCCL makes lazily on the hosts of
  both sides (ncclSend, ncclAllReduce; ``NCCL_RUNTIME_CONNECT``).
- With one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) all streams of a GPU share it. An
  operation that cannot start yet then blocks every later operation, in any stream.
- A message or a collective starts only if all its thread blocks are free, one on each SM of the
  GPU. It holds them until it ends. A posted receive holds them until its send arrives.

All rules except the last only say "after", so the result does not depend on speed. The operations
can run if there is no cycle of waits. With a budget of thread blocks the result depends on the
order of events, unless no rank can ever need more than the budget (``most_blocks``)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation that a host issues to a stream.

    Attributes:
        name: Name in messages.
        stream: "compute", or a communicator, which has its own stream.
        waits: Indices of operations of this rank that must have ended before.
        meets: The message or collective of which this is one rank's part; None if it involves no
            other rank.
        parts: Number of ranks of that message or collective.
        holds: Whether the host waits until it has ended.
        blocks: Thread blocks that it holds from its start to its end.
    """

    name: str
    stream: Hashable
    waits: tuple[int, ...] = ()
    meets: Hashable = None
    parts: int = 1
    holds: bool = False
    blocks: int = 0


def stuck_operations(
    programs: Sequence[Sequence[Operation]], *, one_queue: bool = False, budget: int | None = None
) -> list[Operation | None]:
    """Return each rank's first operation that never starts, or None if all of them start.

    Args:
        programs: Operations of each rank, in the order in which its host issues them.
        one_queue: Whether all streams of a rank share one hardware queue.
        budget: Thread blocks of a rank. None means unlimited.
    """
    started, _ = _run(programs, one_queue=one_queue, budget=budget)
    return [next((one for one, mark in rank if not mark), None) for rank in started]


def delayed_operations(
    programs: Sequence[Sequence[Operation]], *, budget: int
) -> list[list[Operation]]:
    """Return the operations of each rank that wait for thread blocks in this simulation's order."""
    _, delayed = _run(programs, budget=budget)
    return [[one for one, mark in rank if mark] for rank in delayed]


def most_blocks(program: Sequence[Operation]) -> int:
    """Return a bound of the thread blocks that a rank's operations hold at once, in any order.

    A stream runs one operation at a time. No operation waits for blocks on a GPU with this many.
    """
    largest: Counter[Hashable] = Counter()
    for operation in program:
        largest[operation.stream] = max(largest[operation.stream], operation.blocks)
    return largest.total()


_Marks = list[list[tuple[Operation, int]]]


def _run(
    programs: Sequence[Sequence[Operation]], *, one_queue: bool = False, budget: int | None = None
) -> tuple[_Marks, _Marks]:
    """Mark the operations that start, and those that have to wait for thread blocks.

    Messages and collectives start at once if there are blocks for them. Among the computations that
    can start, the latest runs first, so some ranks run ahead of others.
    """
    waits = _Waits.of(programs, one_queue=one_queue)
    ranks = [rank for rank, program in enumerate(programs) for _ in program]
    blocks = [operation.blocks for program in programs for operation in program]
    free = [sum(blocks) if budget is None else budget] * len(programs)
    short: list[list[int]] = [[] for _ in programs]
    started, delayed = bytearray(len(ranks)), bytearray(len(ranks))
    holding: deque[int] = deque()
    others: list[int] = []
    woken: Iterable[int] = (number for number, count in enumerate(waits.missing) if not count)
    while True:
        for number in woken:
            (holding if blocks[number] else others).append(number)
        if not holding and not others:
            break
        number = holding.popleft() if holding else others.pop()
        if blocks[number] > free[ranks[number]]:
            delayed[number] = 1
            short[ranks[number]].append(number)
            woken = ()
            continue
        started[number] = 1
        free[ranks[number]] -= blocks[number]
        ended = waits.ended_by(number)
        for one in ended:
            free[ranks[one]] += blocks[one]
            holding += short[ranks[one]]
            short[ranks[one]].clear()
        woken = waits.woken_by(number, ended)
    return _by_rank(programs, started), _by_rank(programs, delayed)


def _by_rank(programs: Sequence[Sequence[Operation]], marks: bytearray) -> _Marks:
    every = iter(marks)
    return [list(zip(program, islice(every, len(program)), strict=True)) for program in programs]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waits:
    """Dependencies of the operations, which are numbered rank by rank.

    Attributes:
        first: Number of each rank's first operation.
        missing: Number of operations that each operation still waits for.
        ends: Operations that wait for the end of each operation.
        starts: Operations that wait only for the start of each operation. Empty if there are none.
        parts: Members of a message or collective, by each of its operations.
        absent: Number of members that have not started, by the first of them.
    """

    first: list[int]
    missing: list[int]
    ends: list[list[int]]
    starts: list[list[int]]
    parts: dict[int, list[int]]
    absent: dict[int, int]

    @classmethod
    def of(cls, programs: Sequence[Sequence[Operation]], *, one_queue: bool) -> _Waits:
        """Return the dependencies of the operations of all ranks."""
        first = [0, *accumulate(map(len, programs))]
        missing = [0] * first[-1]
        ends: list[list[int]] = [[] for _ in missing]
        starts: list[list[int]] = [[] for _ in missing] if one_queue else []
        meetings: dict[Hashable, list[int]] = {}
        for begin, program in zip(first, programs, strict=False):
            latest: dict[Hashable, int] = {}
            held = -1
            for place, operation in enumerate(program):
                number = begin + place
                for before in {latest.get(operation.stream, -1), held, *operation.waits} - {-1}:
                    ends[begin + before].append(number)
                    missing[number] += 1
                if one_queue and place:
                    starts[number - 1].append(number)
                    missing[number] += 1
                if operation.parts > 1:
                    meetings.setdefault(operation.meets, []).append(number)
                latest[operation.stream] = place
                held = place if operation.holds else held
        sizes = [operation.parts for program in programs for operation in program]
        return cls(
            first=first,
            missing=missing,
            ends=ends,
            starts=starts,
            parts={number: members for members in meetings.values() for number in members},
            absent={members[0]: sizes[members[0]] for members in meetings.values()},
        )

    def ended_by(self, number: int) -> list[int]:
        """Return the operations that end when ``number`` starts: all members, with the last one."""
        members = self.parts.get(number)
        if members is None:
            return [number]
        self.absent[members[0]] -= 1
        return [] if self.absent[members[0]] else members

    def woken_by(self, number: int, ended: list[int]) -> list[int]:
        """Return the operations that become ready when ``number`` starts."""
        ready = []
        for woken in chain(
            *(self.ends[one] for one in ended), self.starts[number] if self.starts else ()
        ):
            self.missing[woken] -= 1
            if not self.missing[woken]:
                ready.append(woken)
        return ready
