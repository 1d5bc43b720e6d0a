"""Real processes with a time limit, which report their next action.

If one hangs, its last report names the place. The processes are forked: the caller must have
imported the modules that they need, and must not have used a GPU itself.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from lightning_ptdp.base.errors import numbered

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
                f"{numbered('rank', hanging)} {'hangs' if len(hanging) == 1 else 'hang'} in "
                f"{self._at(hanging[0])}"
            )
            sentences += [f"rank {rank} is waiting in {self._at(rank)}" for rank in waiting]
        return "; ".join(sentences)

    def _at(self, rank: int) -> str:
        return self.reports[rank][-1] if self.reports[rank] else "its start"


def run_ranks(function: Callable[[int, Tell], object], *, count: int, timeout_s: float) -> Outcome:
    """Run ``function(rank, tell)`` in ``count`` processes.

    No process is left when the call returns. After the first failure, the other processes get two
    seconds, because they may wait for the failed one for ever.
    """
    context = multiprocessing.get_context("fork")
    outcome = Outcome(reports={rank: [] for rank in range(count)})
    pipes: dict[Connection, int] = {}
    processes = []
    for rank in range(count):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(sender, function, rank))
        process.start()
        sender.close()
        processes.append(process)
        pipes[receiver] = rank
    try:
        _listen(outcome, pipes, processes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join(_ENDING_S)
    return outcome


def _serve(sender: Connection, function: Callable[[int, Tell], object], rank: int) -> None:
    try:
        sender.send(("result", function(rank, lambda place: sender.send(("report", place)))))
    except BaseException as error:
        # The first line only: notes follow it.
        sender.send(("error", traceback.format_exception_only(error)[0].strip().partition("\n")[0]))


def _listen(
    outcome: Outcome,
    pipes: dict[Connection, int],
    processes: Sequence[BaseProcess],
    deadline: float,
) -> None:
    while pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(pipes), timeout=left):
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionError):
                processes[rank].join(_ENDING_S)
                kind = "error"
                value = f"the process ended with exit code {processes[rank].exitcode}"
            if kind == "report":
                outcome.reports[rank].append(value)
                continue
            (outcome.results if kind == "result" else outcome.errors)[rank] = value
            del pipes[pipe]
            if kind == "error":
                deadline = min(deadline, time.monotonic() + _ENDING_S)


# ---- One call in a forked process ----------------------------------------------------------------
#
# For functions that would spoil later forks of this process: it then starts neither CUDA nor
# autograd's threads.


_LIMIT_S = 600.0
_TRIAL_LIMIT_S = 15.0
_Result = TypeVar("_Result")


def in_child(function: Callable[[], _Result], *, limit_s: float = _LIMIT_S) -> _Result:
    """Return the result of ``function``, called in a forked process.

    This process then starts neither CUDA nor autograd's threads. Processes forked after either of
    them could not train.

    Raises:
        RuntimeError: The child process ended, or gave no answer within ``limit_s``.
        Exception: The exception that ``function`` raised.
    """

    def answer(rank: int, tell: Tell) -> tuple[bool, Any]:
        try:
            return True, function()
        except Exception as error:
            return False, error

    outcome = run_ranks(answer, count=1, timeout_s=limit_s)
    if outcome.late:
        raise RuntimeError(f"a forked helper process gave no answer for {limit_s:.0f} s")
    if outcome.errors:
        raise RuntimeError(f"a forked helper process failed: {outcome.errors[0]}")
    succeeded, result = outcome.results[0]
    if not succeeded:
        raise result
    return result


def try_in_child(trial: Callable[[], ValueError | None]) -> None:
    """Call ``trial``, which runs the user's code, in a silent forked process.

    This process, its data and its random numbers do not change. The result is unknown if the trial
    raises an error or exceeds its limit, or if other threads of this process may hold locks.

    Raises:
        ValueError: The trial returned it.
    """

    def silent() -> ValueError | None:
        devnull = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):
            os.dup2(devnull, output)
        torch.set_num_threads(1)
        return trial()

    if threading.active_count() > 1:
        return
    try:
        error = in_child(silent, limit_s=_TRIAL_LIMIT_S)
    except Exception:
        return
    if error is not None:
        raise error
