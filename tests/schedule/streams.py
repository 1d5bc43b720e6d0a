"""Whether the operations that hosts give to their GPUs' streams can all run: the rules of CUDA and NCCL, on paper.

- Operations of one stream run one after the other, and an operation does not start before those that it waits for have ended.
- A message, or a collective, ends when it has started on all its ranks: a send waits for its receive (rendezvous).
- A host gives operations without waiting for them, but for those that *hold* it: what it reads from the device, and the first use of a
  connection, which NCCL makes on the host of both sides (ncclSend, ncclAllReduce: lazily, ``NCCL_RUNTIME_CONNECT``).
- With one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) all streams of a GPU share it: an operation that cannot start yet holds
  up whatever was given after it, in any stream.

All of these say "after", so what can run does not depend on how fast anybody is: the operations can run if nobody waits in a circle.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What one host gives to one stream.

    Attributes:
        name: For messages.
        stream: "compute", or the communicator, which has a stream of its own.
        waits: Places in this rank's list of what must have ended before.
        meets: What this is one rank's part of: a message or collective; None: it is alone.
        parts: How many ranks that has.
        holds: The host does not go on before it has ended.
    """

    name: str
    stream: Hashable
    waits: tuple[int, ...] = ()
    meets: Hashable = None
    parts: int = 1
    holds: bool = False


def stuck_operations(programs: Sequence[Sequence[Operation]], *, one_queue: bool = False) -> list[Operation | None]:
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
        for woken in (*_ended(number, parts, absent, wakes), *(starts[number] if one_queue else ())):
            missing[woken] -= 1
            if not missing[woken]:
                ready.append(woken)
    return [
        next((operation for place, operation in enumerate(program) if not started[first[rank] + place]), None)
        for rank, program in enumerate(programs)
    ]


def _ended(number: int, parts: dict[int, list[int]], absent: dict[int, int], wakes: list[list[int]]) -> Iterator[int]:
    """What waited for the end of what has ended by the start of ``number``."""
    members = parts.get(number)
    if members is None:
        yield from wakes[number]
        return
    absent[members[0]] -= 1
    if not absent[members[0]]:
        for member in members:
            yield from wakes[member]
