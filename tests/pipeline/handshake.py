"""Communication that begins as NCCL's does: the first use of a connection holds every host until all its ends have come to it.

gloo connects when a group is made and lets a first message go at once, so that a program which would hang on NCCL passes there. Here
the first message of a pair on a group, and the first collective of a group, are a rendezvous over a store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist

__all__ = ["Handshakes", "handshaking"]

_MESSAGES = ("send", "isend", "recv", "irecv")
_COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)


class Handshakes:
    """What has been connected, in order.

    Args:
        store: Where hosts meet.
        limit_s: After this time without a peer a host hangs.

    Attributes:
        made: (kind, group's name, global ranks) of every first use by this process.
    """

    def __init__(self, store: dist.Store, *, limit_s: float) -> None:
        self._store, self._limit = store, timedelta(seconds=limit_s)
        self.made: list[tuple[str, str, tuple[int, ...]]] = []

    def meet(self, kind: str, group: Any, ranks: Sequence[int]) -> None:
        """Wait for the other ends, the first time.

        Raises:
            TimeoutError: They do not come.
        """
        group = dist.group.WORLD if group is None else group
        connection = (kind, group.group_name, tuple(sorted(ranks)))
        if connection in self.made:
            return
        self.made.append(connection)
        self._store.set(f"{connection}/{dist.get_rank()}", "here")
        for rank in ranks:
            try:
                self._store.wait([f"{connection}/{rank}"], self._limit)
            except RuntimeError as error:
                raise TimeoutError(f"rank {dist.get_rank()} hangs: rank {rank} does not come to {kind} {ranks}") from error


@contextlib.contextmanager
def handshaking(store: dist.Store, *, limit_s: float = 10.0) -> Iterator[Handshakes]:
    """Connections are made lazily in this context, by whatever calls torch.distributed's functions."""
    hands = Handshakes(store, limit_s=limit_s)

    def message(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Any, peer: int, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            hands.meet("messages", group, (dist.get_rank(), peer))
            return function(tensor, peer, *args, group=group, **kwargs)

        return call

    def collective(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            hands.meet("collective", group, dist.get_process_group_ranks(group))
            return function(*args, group=group, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for names, wrap in ((_MESSAGES, message), (_COLLECTIVES, collective)):
            for name in names:
                if hasattr(dist, name):
                    stack.enter_context(mock.patch.object(dist, name, wrap(getattr(dist, name))))
        yield hands
