"""Real processes with a time limit, which report their next action.

If one hangs, its last report names the place. The processes are forked: the caller must have
imported the modules that they need, and must not have used a GPU itself.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

Tell = Callable[[str], None]
"""Called by a rank with the name of its next action."""

_ENDING_S = 2.0


@dataclass(kw_only=True)
class Outcome:
    """Results and errors of the ranks.

    Attributes:
        results: Return value of each rank.
        errors: Reason in one line for each rank that raised or died.
        reports: Reports of each rank, in order; the last one names its current action.
    """

    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    reports: dict[int, list[str]] = field(default_factory=dict)

    @property
    def late(self) -> list[int]:
        """Return the ranks that neither returned nor raised."""
        return [
            rank for rank in self.reports if rank not in self.results and rank not in self.errors
        ]

    def explain(self) -> str:
        """Return a text that names each failed or hung rank and its place; "" if all returned.

        The rank with the least progress is the one that the other ranks wait for.
        """
        sentences = [
            f"rank {rank} failed in {self._at(rank)}: {text}" for rank, text in self.errors.items()
        ]
        if self.late and not self.errors:
            least = min(len(self.reports[rank]) for rank in self.late)
            hanging = [rank for rank in self.late if len(self.reports[rank]) == least]
            waiting = [rank for rank in self.late if rank not in hanging]
            sentences.append(
                f"{_ranks(hanging)} {'hangs' if len(hanging) == 1 else 'hang'} in "
                f"{self._at(hanging[0])}"
            )
            sentences += [f"rank {rank} is waiting in {self._at(rank)}" for rank in waiting]
        return "; ".join(sentences)

    def _at(self, rank: int) -> str:
        return self.reports[rank][-1] if self.reports[rank] else "its start"


def run_ranks(
    function: Callable[..., object], *, count: int, args: Sequence[object] = (), timeout_s: float
) -> Outcome:
    """Run ``function(rank, tell, *args)`` in ``count`` processes.

    No process is left when the call returns. After the first failure, the other processes get two
    seconds, because they may wait for the failed one for ever.
    """
    context = multiprocessing.get_context("fork")
    outcome = Outcome(reports={rank: [] for rank in range(count)})
    pipes: dict[Connection, int] = {}
    processes = []
    for rank in range(count):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(sender, function, rank, tuple(args)))
        process.start()
        sender.close()
        processes.append(process)
        pipes[receiver] = rank
    try:
        _listen(outcome, pipes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join(_ENDING_S)
    return outcome


def _serve(
    sender: Connection, function: Callable[..., object], rank: int, args: Sequence[object]
) -> None:
    try:
        sender.send(("result", function(rank, lambda place: sender.send(("report", place)), *args)))
    except BaseException as error:
        # The first line only: notes follow it.
        sender.send(("error", traceback.format_exception_only(error)[0].strip().partition("\n")[0]))


def _listen(outcome: Outcome, pipes: dict[Connection, int], deadline: float) -> None:
    while pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(pipes), timeout=left):
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionError):
                kind = "error"
                value = "the process died"
            if kind == "report":
                outcome.reports[rank].append(value)
                continue
            (outcome.results if kind == "result" else outcome.errors)[rank] = value
            del pipes[pipe]
            if kind == "error":
                deadline = min(deadline, time.monotonic() + _ENDING_S)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
