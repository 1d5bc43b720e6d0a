"""How the ranks come together: one that is lost before there are process groups is named too."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_ptdp.pipeline.p2p import PeerError
from lightning_ptdp.pipeline.watchdog import is_communication_error

__all__ = ["joining"]

_CAME, _FAILED = "lightning_ptdp/came", "lightning_ptdp/failed"
_ANSWERS_S = 2.0
_POLL_S = 0.05


@contextlib.contextmanager
def joining(environment: Any, *, rank: int, world_size: int, limit: timedelta) -> Iterator[Any]:
    """Around the making of the process groups: connects to the store, which ``init_process_group`` is to be given.

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
    store: Any = None
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=limit))
        store.set_timeout(limit)
        store.set(f"{_CAME}/{rank}", "")
        yield store
    except Exception as error:
        if not is_communication_error(error):
            raise
        where = f"{environment.main_address}:{environment.main_port}"
        raise PeerError(
            f"rank {rank} could not join the other ranks: {_missed(store, rank, world_size, where)}: {error}"
        ) from error


def _missed(store: Any, rank: int, world_size: int, where: str) -> str:
    unreachable = f"rank 0, which keeps the store at {where} (or torchrun does), does not answer"
    if store is None:
        return unreachable
    silent = [other for other in range(world_size) if other != rank]
    try:
        store.set_timeout(timedelta(seconds=_ANSWERS_S))
        store.set(f"{_FAILED}/{rank}", "")
        # Whoever lives notices as well, and about now.
        deadline = time.monotonic() + _ANSWERS_S
        while True:
            silent = [other for other in silent if not store.check([f"{_FAILED}/{other}"])]
            if len(silent) <= 1 or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        absent = [other for other in silent if not store.check([f"{_CAME}/{other}"])]
    except dist.DistError:
        return unreachable
    if absent:
        return f"{_ranks(absent)} did not come"
    return f"{_ranks(silent)} came and was lost" if silent else "one came and was lost"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
