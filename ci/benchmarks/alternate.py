"""Ours and a peer in one run: the Trainer's batches, and after every few of them the peer's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
from harness import usual_heap

__all__ = ["Alternate"]


class Alternate(L.Callback):
    """Times a few of the Trainer's batches, then as many of the peer's, and so on.

    Args:
        peer: Runs that many steps and returns the seconds that one took.
        steps: Batches in a turn.
        barrier: Called before the clock stops, so that all ranks have finished.
    """

    def __init__(
        self, peer: Callable[[int], float], *, steps: int, barrier: Callable[[], Any] = lambda: None
    ) -> None:
        self._peer, self._steps, self._barrier = peer, steps, barrier
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self._start = 0.0

    def on_train_start(self, *_: Any) -> None:
        self._peer(1)
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self._steps:
            return
        self._barrier()
        self.ours.append((time.perf_counter() - self._start) / self._steps)
        with usual_heap():
            self.theirs.append(self._peer(self._steps))
        self._start = time.perf_counter()
