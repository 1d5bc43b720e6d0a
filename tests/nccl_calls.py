"""Communicator calls of a rank's host, recorded by queued.py and run by NCCL's rules.

The rules are in schedule/streams.py.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.schedule.streams import Operation

__all__ = ["Call", "operations_of"]


@dataclass(frozen=True)
class Call:
    """One call of the host.

    Attributes:
        what: "send", "recv", "batch" (messages that start together), a collective, "wait", "read"
            (the host reads a tensor), "side" (the side stream waits for the computation) or "join"
            (the computation waits for the side stream).
        group: Name and global ranks of the group.
        parts: Data moved: elements and dtype of a collective's tensors; (source, destination,
            elements) of messages.
        waits: For "wait", the index of the awaited call.
        stream: Stream in which the call is issued and awaited.
    """

    what: str
    group: tuple[str, tuple[int, ...]] = ("", ())
    parts: tuple[Any, ...] = ()
    waits: int = -1
    stream: str = "compute"


def operations_of(calls: Sequence[Call]) -> list[Operation]:
    """Return the operations that a GPU receives for the host's calls.

    Each communicator is a stream. A wait precedes all later computation. A read blocks the host.
    """
    given: list[Operation] = []
    counts: Counter[Hashable] = Counter()
    ends: dict[int, list[int]] = {}
    latest = {"compute": -1, "side": -1}

    def give(
        name: str,
        stream: Hashable,
        waits: Sequence[int],
        meets: Hashable = None,
        parts: int = 1,
        holds: bool = False,
    ) -> int:
        waits = tuple(place for place in waits if place >= 0)
        given.append(
            Operation(name=name, stream=stream, waits=waits, meets=meets, parts=parts, holds=holds)
        )
        return len(given) - 1

    before: dict[Hashable, list[int]] = {}
    for place, call in enumerate(calls):
        stream = call.stream
        if call.what in ("side", "join"):
            stream = "side" if call.what == "side" else "compute"
            latest[stream] = give(call.what, stream, tuple(latest.values()))
        elif call.what == "read":
            latest[stream] = give("read", stream, (latest[stream],), holds=True)
        elif call.what == "wait":
            latest[stream] = give("wait", stream, (latest[stream], *ends[call.waits]))
        else:
            messages = call.what in ("send", "recv", "batch")
            meetings = (
                [(call.group, part[:2]) for part in call.parts]
                if messages
                else [(call.group, "all")]
            )
            # The messages of a batch start together: each has its own stream after all earlier
            # operations of the communicator.
            held, now = before.get(call.group, []), []
            for index, meeting in enumerate(meetings):
                counts[meeting] += 1
                detail = call.parts[index][2] if messages else (call.what, call.parts)
                meets = (meeting, counts[meeting], detail)
                size = 2 if messages else len(call.group[1])
                now.append(
                    give(
                        f"{call.what} {call.group[1]}",
                        (call.group, index),
                        (latest[stream], *held),
                        meets,
                        size,
                    )
                )
            before[call.group] = ends[place] = now
    return given
