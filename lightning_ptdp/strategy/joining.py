"""How the ranks come together: afresh every time that they are started again, and one that is lost on the way is named.

torchrun keeps one store for all its restarts, in which the addresses of processes that are gone still lie; who reads them before the new
ones are written connects to nobody. So the ranks of one life agree on a name for it, under which they keep everything::

    rank r    sets call/r to a name of its own, N
    rank 0    answers every N that it finds with the name of this life, L, until all ranks have set L/came/r
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_ptdp._torch import is_communication_error
from lightning_ptdp.pipeline.p2p import PeerError

__all__ = ["joining"]

_CALL, _ANSWER = "lightning_ptdp/call", "lightning_ptdp/answer"
_CAME, _FAILED, _KNOWS = "lightning_ptdp/came", "lightning_ptdp/failed", "lightning_ptdp/knows"
_ANSWERS_S = 2.0
_POLL_S = 0.02

_T = TypeVar("_T")


@contextlib.contextmanager
def joining(environment: Any, *, rank: int, world_size: int, limit: timedelta) -> Iterator[dist.Store]:
    """Around the making of the process groups: yields the store that ``init_process_group`` is to be given.

    Args:
        environment: Lightning's cluster environment, which knows where the store is.
        rank: Global rank.
        world_size: Number of ranks.
        limit: Of every wait.

    Raises:
        PeerError: The others did not all come, or one was lost meanwhile; names those that did not come, or else those that did not
            notice that somebody is lost.
    """
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    shared: Any = None
    own: Any = None
    try:
        # A world of one: rank 0's store would wait for the others, whom it does not know by name.
        shared, _, _ = _within(limit, lambda: next(dist.rendezvous("env://", rank, 1, timeout=limit)))
        shared.set_timeout(limit)
        life = uuid.uuid4().hex if rank == 0 else _within(limit, lambda: _called(shared, rank))
        own = dist.PrefixStore(life, shared)
        own.set(f"{_CAME}/{rank}", "")
        if rank == 0:
            _answer(shared, own, life, world_size, limit)
        yield own
    except Exception as error:
        if not is_communication_error(error):
            raise
        where = f"{environment.main_address}:{environment.main_port}"
        missed = _lost(own, rank, world_size) if own is not None else _unanswered(shared, where)
        raise PeerError(f"rank {rank} could not join the other ranks: {missed}: {error}") from error


def _within(limit: timedelta, action: Callable[[], _T]) -> _T:
    """What ``action`` returns or raises; ``DistNetworkError`` after ``limit``.

    torch's client takes up to three times its own limit to give up on a store that goes away while it connects, and waits for ever for
    one that listens and does not answer.
    """
    outcome: queue.SimpleQueue[tuple[_T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((action(), None))
        except Exception as error:
            outcome.put((None, error))

    threading.Thread(target=run, name="ptdp-joining", daemon=True).start()
    try:
        value, error = outcome.get(timeout=limit.total_seconds())
    except queue.Empty:
        raise dist.DistNetworkError(f"no answer within {limit.total_seconds():g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _called(shared: dist.Store, rank: int) -> str:
    """Rank 0's answer."""
    name = uuid.uuid4().hex
    shared.set(f"{_CALL}/{rank}", name)
    return shared.get(f"{_ANSWER}/{name}").decode()


def _answer(shared: dist.Store, own: dist.Store, life: str, world_size: int, limit: timedelta) -> None:
    """Answer until all came; calls of processes that are gone are answered too, and nobody hears it."""
    deadline = time.monotonic() + limit.total_seconds()
    missing, answered = list(range(1, world_size)), set[bytes]()
    while True:
        for rank in missing:
            if shared.check([f"{_CALL}/{rank}"]) and (name := shared.get(f"{_CALL}/{rank}")) not in answered:
                answered.add(name)
                shared.set(f"{_ANSWER}/{name.decode()}", life)
        missing = [rank for rank in missing if not own.check([f"{_CAME}/{rank}"])]
        if not missing:
            return
        if time.monotonic() > deadline:
            raise dist.DistStoreError(
                f"{world_size - len(missing)} of {world_size} ranks came within {limit.total_seconds():g} s"
            )
        time.sleep(_POLL_S)


def _lost(own: dist.Store, rank: int, world_size: int) -> str:
    try:
        return _within(timedelta(seconds=3 * _ANSWERS_S), lambda: _missed(own, rank, world_size))
    except dist.DistError:
        return "rank 0, which keeps the store (or torchrun does), does not answer any more"


def _missed(own: dist.Store, rank: int, world_size: int) -> str:
    silent = [other for other in range(world_size) if other != rank]
    own.set_timeout(timedelta(seconds=_ANSWERS_S))
    own.set(f"{_FAILED}/{rank}", "")
    # Whoever lives notices as well, and about now.
    silent = _without(own, silent, _FAILED, enough=1)
    absent = [other for other in silent if not own.check([f"{_CAME}/{other}"])]
    own.set(f"{_KNOWS}/{rank}", "")
    if rank == 0:
        # The store may end with this process.
        _without(own, [other for other in range(1, world_size) if other not in silent], _KNOWS)
    if absent:
        return f"{_ranks(absent)} did not come"
    return f"{_ranks(silent)} came and was lost" if silent else "one came and was lost"


def _without(own: dist.Store, ranks: list[int], key: str, enough: int = 0) -> list[int]:
    """Wait for the ranks' notes; those that have not left one when only ``enough`` are missing, or after a while."""
    deadline = time.monotonic() + _ANSWERS_S
    while True:
        ranks = [rank for rank in ranks if not own.check([f"{key}/{rank}"])]
        if len(ranks) <= enough or time.monotonic() > deadline:
            return ranks
        time.sleep(_POLL_S)


def _unanswered(shared: dist.Store | None, where: str) -> str:
    if shared is None:
        return f"rank 0, which keeps the store at {where} (or torchrun does), does not answer"
    return "rank 0 did not come"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
