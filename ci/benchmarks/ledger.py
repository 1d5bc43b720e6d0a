"""Memory that a pipeline engine keeps for its messages, seen at ``dist.isend`` and ``dist.irecv``,
which every engine calls."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

__all__ = ["Ledger"]


class Ledger:
    """Bytes of receive buffers and of sent tensors of this process, and the most that there were at
    once.

    A receive buffer counts from when it is posted until it was waited for: then it is the stage's
    input. A sent tensor counts from its send until its memory is freed, whoever keeps it. That is
    right for stages that do not need their own output for the backward."""

    def __init__(self) -> None:
        self.received = self.sent = self.peak_received = self.peak_sent = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[Ledger]:
        """While a step runs."""
        with contextlib.ExitStack() as stack:
            for name, change in (("isend", self._watch_send), ("irecv", self._watch_receive)):
                watched = change(getattr(dist, name))
                for module in (dist, distributed_c10d):
                    stack.enter_context(mock.patch.object(module, name, watched))
            yield self

    def _watch_send(self, isend: Callable[..., Any]) -> Callable[..., Any]:
        def watched(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._sent(tensor.nbytes)
            weakref.finalize(tensor.untyped_storage(), self._sent, -tensor.nbytes)
            return isend(tensor, *args, **kwargs)

        return watched

    def _watch_receive(self, irecv: Callable[..., Any]) -> Callable[..., Any]:
        def watched(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._received(tensor.nbytes)
            return _Watched(irecv(tensor, *args, **kwargs), lambda: self._received(-tensor.nbytes))

        return watched

    def _sent(self, change: int) -> None:
        self.sent += change
        self.peak_sent = max(self.peak_sent, self.sent)

    def _received(self, change: int) -> None:
        self.received += change
        self.peak_received = max(self.peak_received, self.received)


class _Watched:
    """A handle that tells once when it was waited for."""

    def __init__(self, work: Any, done: Callable[[], None]) -> None:
        self._work, self._done = work, done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any) -> Any:
        result = self._work.wait(*args)
        done, self._done = self._done, lambda: None
        done()
        return result
