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

All rules only say "after", so the result does not depend on speed. The operations can run if there
is no cycle of waits."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation that a host gives to a stream.

    Attributes:
        name: Name in messages.
        stream: "compute", or a communicator, which has its own stream.
        waits: Indices of operations of this rank that must have ended before.
        meets: The message or collective of which this is one rank's part; None if it involves no
            other rank.
        parts: Number of ranks of that message or collective.
        holds: Whether the host waits until it has ended.
    """

    name: str
    stream: Hashable
    waits: tuple[int, ...] = ()
    meets: Hashable = None
    parts: int = 1
    holds: bool = False


def stuck_operations(
    programs: Sequence[Sequence[Operation]], *, one_queue: bool = False
) -> list[Operation | None]:
    """The first operation of each rank that never starts; None: all of the rank's do.

    Args:
        programs: By rank, in the order in which its host gives them.
        one_queue: Whether all streams of a rank share one hardware queue.
    """
    first = [0]
    for program in programs:
        first.append(first[-1] + len(program))
    meetings: dict[Hashable, list[int]] = {}
    missing = [0] * first[-1]
    wakes: list[list[int]] = [[] for _ in range(first[-1])]
    """By operation: what waits for its end; by ``starts``: what waits for its start alone."""
    starts: list[list[int]] = [[] for _ in range(first[-1])] if one_queue else []
    for rank, program in enumerate(programs):
        latest: dict[Hashable, int] = {}
        held = -1
        for place, operation in enumerate(program):
            number = first[rank] + place
            for before in {latest.get(operation.stream, -1), held, *operation.waits} - {-1}:
                wakes[first[rank] + before].append(number)
                missing[number] += 1
            if one_queue and place:
                starts[number - 1].append(number)
                missing[number] += 1
            if operation.parts > 1:
                meetings.setdefault(operation.meets, []).append(number)
            latest[operation.stream] = place
            held = place if operation.holds else held
    parts = {number: members for members in meetings.values() for number in members}
    sizes = [operation.parts for program in programs for operation in program]
    absent = {number: sizes[number] for members in meetings.values() for number in members[:1]}
    started = bytearray(first[-1])
    ready = [number for number, count in enumerate(missing) if not count]
    while ready:
        number = ready.pop()
        started[number] = 1
        for woken in (
            *_ended(number, parts, absent, wakes),
            *(starts[number] if one_queue else ()),
        ):
            missing[woken] -= 1
            if not missing[woken]:
                ready.append(woken)
    return [
        next(
            (
                operation
                for place, operation in enumerate(program)
                if not started[first[rank] + place]
            ),
            None,
        )
        for rank, program in enumerate(programs)
    ]


def _ended(
    number: int, parts: dict[int, list[int]], absent: dict[int, int], wakes: list[list[int]]
) -> Iterator[int]:
    """Yield the operations that wait for operations which end when ``number`` starts."""
    members = parts.get(number)
    if members is None:
        yield from wakes[number]
        return
    absent[members[0]] -= 1
    if not absent[members[0]]:
        for member in members:
            yield from wakes[member]
