"""Real processes with a time limit. Each says what it does next, so that one that hangs can be
named.

The processes are forked: the caller has imported what they need, and must not have touched a GPU
itself."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["Outcome", "Tell", "run_ranks"]

Tell = Callable[[str], None]
"""Called by a rank with the name of what it does next."""

_ENDING_S = 2.0


@dataclass(kw_only=True)
class Outcome:
    """Results and errors of the ranks.

    Attributes:
        results: What each rank returned.
        errors: Of each rank that raised or died: why, in a line.
        told: What each rank said, in order; the last is what it was in.
    """

    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    told: dict[int, list[str]] = field(default_factory=dict)

    @property
    def late(self) -> list[int]:
        """Ranks that neither returned nor raised."""
        return [rank for rank in self.told if rank not in self.results and rank not in self.errors]

    def explain(self) -> str:
        """Return which rank failed or hangs, and where; "" if all returned.

        A rank that progressed less far than the others is the one for which they wait.
        """
        said = [
            f"rank {rank} failed in {self._at(rank)}: {text}" for rank, text in self.errors.items()
        ]
        if self.late and not self.errors:
            least = min(len(self.told[rank]) for rank in self.late)
            behind = [rank for rank in self.late if len(self.told[rank]) == least]
            others = [rank for rank in self.late if rank not in behind]
            said.append(
                f"{_ranks(behind)} {'hangs' if len(behind) == 1 else 'hang'} in "
                f"{self._at(behind[0])}"
            )
            said += [f"rank {rank} waits in {self._at(rank)}" for rank in others]
        return "; ".join(said)

    def _at(self, rank: int) -> str:
        return self.told[rank][-1] if self.told[rank] else "its start"


def run_ranks(
    function: Callable[..., object], *, count: int, args: Sequence[object] = (), timeout_s: float
) -> Outcome:
    """``function(rank, tell, *args)`` in ``count`` processes, all of which are gone when this
    returns.

    After the first failure the others, which may wait for it for ever, get two seconds.
    """
    context = multiprocessing.get_context("fork")
    outcome = Outcome(told={rank: [] for rank in range(count)})
    pipes: dict[Connection, int] = {}
    processes = []
    for rank in range(count):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(there, function, rank, tuple(args)))
        process.start()
        there.close()
        processes.append(process)
        pipes[here] = rank
    try:
        _listen(outcome, pipes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join(_ENDING_S)
    return outcome


def _serve(
    there: Connection, function: Callable[..., object], rank: int, args: Sequence[object]
) -> None:
    try:
        there.send(("result", function(rank, lambda what: there.send(("told", what)), *args)))
    except BaseException as error:
        there.send(
            ("error", traceback.format_exception_only(error)[0].strip().partition("\n")[0])
        )  # notes follow it


def _listen(outcome: Outcome, pipes: dict[Connection, int], deadline: float) -> None:
    while pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(pipes), timeout=left):
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionError):
                kind, value = "error", "the process died"
            if kind == "told":
                outcome.told[rank].append(value)
                continue
            (outcome.results if kind == "result" else outcome.errors)[rank] = value
            del pipes[pipe]
            if kind == "error":
                deadline = min(deadline, time.monotonic() + _ENDING_S)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
