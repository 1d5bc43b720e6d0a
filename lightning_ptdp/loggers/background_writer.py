"""Background thread that writes log items, so that training never waits for a store.

MLflow's own asynchronous queue is not used, for three reasons:

- It is stored, with its threads, in a process-wide cache. In a forked process these threads do not
  run, and a flush waits forever.
- It writes every call as a transaction of its own.
- It drops calls that fail."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:  # imported when used
    from mlflow.entities import Metric


Item = TypeVar("Item")
_PAUSE_S = 0.5
_FORK_S = 10.0


@dataclass(kw_only=True)
class _Task:
    """Action that runs when all items are written."""

    action: Callable[[], object]
    deadline: float
    awaited: bool
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class BackgroundWriter(Generic[Item]):
    """Queue of items that a thread passes to ``write``, in order and in batches.

    After a failed write there is one warning; the items are kept and written with the next ones. A
    fork waits until no write is running. Otherwise the child would wait forever for locks that the
    store holds.

    Args:
        write: Called in the thread with 1 to ``most`` items; may raise, and may take long.
        most: Largest number of items in one call.
    """

    def __init__(self, write: Callable[[Sequence[Item]], None], *, most: int = 1000) -> None:
        self._write = write
        self._most = most
        self._items: list[Item] = []
        self._tasks: list[_Task] = []
        self._changed = threading.Condition()
        self._warned = False
        self._writing = threading.RLock()
        self._held = False
        hold = weakref.WeakMethod(self._hold)
        go_on = weakref.WeakMethod(self._go_on)
        os.register_at_fork(before=partial(_call, hold), after_in_parent=partial(_call, go_on))
        self._thread = threading.Thread(
            target=self._loop, name="lightning-ptdp-log-writer", daemon=True
        )
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queue an item; returns at once."""
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    @property
    def unwritten(self) -> Sequence[Item]:
        """Return the items that are not written yet."""
        with self._changed:
            return tuple(self._items)

    def run(self, action: Callable[[], object], *, limit_s: float) -> None:
        """Write all items, then call ``action`` in the thread, with retries for ``limit_s``.

        Raises:
            TimeoutError: A write or the action did not return in time.
            Exception: Last exception of a write or the action. The items are kept.
        """
        task = self._add(action, limit_s, awaited=True)
        if not task.done.wait(limit_s + _PAUSE_S):
            raise TimeoutError(f"no answer within {limit_s:g} s")
        if task.error is not None:
            raise task.error

    def later(self, action: Callable[[], object], *, limit_s: float) -> None:
        """Do the same as ``run`` in the background; a final failure gives a warning."""
        self._add(action, limit_s, awaited=False)

    def _add(self, action: Callable[[], object], limit_s: float, *, awaited: bool) -> _Task:
        task = _Task(action=action, deadline=time.monotonic() + limit_s, awaited=awaited)
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()
        return task

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._tasks)
                task = self._tasks.pop(0) if self._tasks else None
            if task is not None:
                self._finish(task)
                continue
            try:
                self._write_items()
            except Exception as error:
                self._warn(f"logging failed and will be retried; training continues: {error}")
                self._wait_for_more()

    def _warn(self, text: str) -> None:
        if not self._warned:
            warnings.warn(text, stacklevel=2)
        self._warned = True

    def _finish(self, task: _Task) -> None:
        while True:
            try:
                self._write_items()
                with self._writing:
                    task.action()
                task.error = None
            except Exception as error:
                task.error = error
            if task.error is None or time.monotonic() + _PAUSE_S > task.deadline:
                break
            time.sleep(_PAUSE_S)
        if task.error is not None and not task.awaited:
            self._warn(f"logging failed; training continues: {task.error}")
        task.done.set()

    def _write_items(self) -> None:
        while batch := self.unwritten[: self._most]:
            with self._writing:
                self._write(batch)
            with self._changed:
                del self._items[: len(batch)]

    def _wait_for_more(self) -> None:
        """Wait for new items or tasks, so that a failing store is not retried continuously."""
        with self._changed:
            num_items = len(self._items)
            self._changed.wait_for(lambda: len(self._items) > num_items or self._tasks)

    def _hold(self) -> None:
        self._held = self._writing.acquire(timeout=_FORK_S)

    def _go_on(self) -> None:
        if self._held:
            self._writing.release()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (bound_method := method()) is not None:
        bound_method()


# ---- File of metrics that a store did not accept -------------------------------------------------


_FILE = "unwritten_metrics.jsonl"


def unwritten_file(folder: Path) -> Path:
    """Return the file in a run's folder for metrics that a store did not accept."""
    return folder / _FILE


def append_metrics(folder: Path, metrics: Sequence[Metric]) -> None:
    """Append MLflow's metrics to a file in ``folder``, one JSON object per line.

    Raises:
        OSError: The file cannot be written.
    """
    rows = [
        {
            "key": metric.key,
            "value": metric.value,
            "timestamp": metric.timestamp,
            "step": metric.step,
        }
        for metric in metrics
    ]
    folder.mkdir(parents=True, exist_ok=True)
    _append(unwritten_file(folder), "".join(json.dumps(row) + "\n" for row in rows))


def keep_metrics(folder: Path, metrics: Sequence[Metric]) -> str:
    """Append metrics as ``append_metrics`` does, and return a sentence about it.

    If that fails, the sentence names the lost metrics. Never raises."""
    if not metrics:
        return "but it has all its metrics"
    try:
        append_metrics(folder, metrics)
    except OSError as error:
        steps = sorted({metric.step for metric in metrics})
        return (
            f"and {len(metrics)} metrics are lost, because neither the run nor "
            f"{unwritten_file(folder)} accepted them ({error}): "
            f"{', '.join(sorted({metric.key for metric in metrics}))} of steps {steps[0]} to "
            f"{steps[-1]}"
        )
    return f"and {len(metrics)} metrics that it did not accept are kept in {unwritten_file(folder)}"


def _append(path: Path, text: str) -> None:
    """Append all of ``text``, or nothing if an error occurs."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, size)
        raise
