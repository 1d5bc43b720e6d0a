"""Work of a preparation: a folder that keeps finished parts, processes, and progress.

::

    .<output>.preparing/
      key.json          from what and with which settings; for another key, all of it is thrown away
      lock              held by the process that works here
      survey.json       the division into training and validation
      tokenizer.model   (and tokenizer.json)
      parts/            tokens of finished parts, and a record of each, which is written last
      store/            what becomes the output
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import multiprocessing
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from tqdm import tqdm

from lightning_ptdp.base.time_limit import in_thread
from lightning_ptdp.checkpoint.files import discard, new_number
from lightning_ptdp.data.data_error import CorpusError, DataError, TokenizerError


@contextlib.contextmanager
def work_folder(output: Path, key: Mapping[str, Any]) -> Iterator[Path]:
    """Provide a folder to work in.

    The folder is removed after success, and after an error (corpus or tokenizer) that makes its
    contents useless. After any other end, including a kill, the next call with the same key reuses
    its contents. If another process works in the folder, this call gets a temporary folder of its
    own.

    Args:
        output: Folder to prepare.
        key: Settings on which the work depends, in JSON's types.
    """
    shared = output.with_name(f".{output.name}.preparing")
    lock = _lock(shared)
    folder = shared if lock is not None else output.with_name(f".{output.name}.{new_number()}")
    keep = False
    try:
        folder.mkdir(exist_ok=True)
        if read_record(folder / "key.json") != key:
            _empty(folder)
            write_record(folder / "key.json", key)
        (folder / "parts").mkdir(exist_ok=True)
        yield folder
    except (CorpusError, TokenizerError):
        raise
    except BaseException:
        keep = lock is not None
        raise
    finally:
        if not keep:
            # Another process that begins meanwhile must not use a folder that is being removed.
            with contextlib.suppress(OSError):
                discard(folder)
        if lock is not None:
            lock.close()


def write_record(path: Path, values: Mapping[str, Any]) -> None:
    """Write JSON; the file appears complete or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(values), "utf-8")
    part.replace(path)


def read_record(path: Path) -> Any:
    """Return the values that ``write_record`` wrote; None if nothing is readable."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _lock(folder: Path) -> BinaryIO | None:
    """Return the open lock of the folder, or None if another process holds it.

    The lock is released when it is closed or the process ends.
    """
    while True:
        folder.mkdir(exist_ok=True)
        try:
            stream = open(folder / "lock", "wb")  # noqa: SIM115 - held while this process works
        except FileNotFoundError:
            continue  # the previous holder has finished and removed the folder
        try:
            # The lock belongs to the process, not to the open file: workers that outlive the
            # process for a moment must not hold it.
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.close()
            return None
        if _is_at(stream, folder / "lock"):
            return stream
        stream.close()


def _is_at(stream: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != "lock":
            entry.unlink()


# ---- Calls of functions in other processes -------------------------------------------------------
#
# ``ordered_map`` covers many items and keeps the order of the results. ``call_in_process`` makes
# one call whose memory must be returned to the system.


Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], *, num_workers: int
) -> Generator[Result, None, None]:
    """Apply a function in ``num_workers`` processes, or in this one if it is 1.

    The results keep the order of the items. Only a few results wait at a time.

    Raises:
        DataError: A process ended without a result.
        Exception: The exception of ``function``, at the position of its item.
    """
    if num_workers == 1:
        yield from map(function, items)
        return
    yield from _over_processes(function, items, num_workers)


def call_in_process(function: Callable[[Item], Result], item: Item) -> Result:
    """Return ``function(item)``, computed in a process of its own.

    The end of the process returns its memory to the system, which an allocator seldom does.

    Raises:
        DataError: The process ended without a result.
        Exception: The exception of ``function``.
    """
    (result,) = _over_processes(function, [item], 1)
    return result


def _over_processes(
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int
) -> Generator[Result, None, None]:
    # Fork if possible, as torch's DataLoader does: a new process would first import torch and run
    # the user's script again.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if "fork" in methods else None)
    executor = ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_prepare_worker, initargs=(function,)
    )
    futures: deque[Future[Result]] = deque()
    try:
        for item in items:
            futures.append(executor.submit(_call, item))
            if len(futures) > 2 * num_workers:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    except BrokenProcessPool as error:
        hint = f". Use fewer than num_workers={num_workers}" if num_workers > 1 else ""
        raise DataError(
            f"a process was killed, possibly because memory ran out{hint}. Finished parts are kept"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


_FUNCTION: ContextVar[Callable[[Any], Any]] = ContextVar("function of a worker")
"""Set once in each worker: sent with every item, a tokenizer would take longer than its texts."""


def _call(item: Any) -> Any:
    return _FUNCTION.get()(item)


def _prepare_worker(function: Callable[[Any], Any]) -> None:
    """Prepare a worker: share the parent's objects, and exit if the parent is killed."""
    _FUNCTION.set(function)
    # A forked process does not have the threads of its parent's OpenMP, and would wait for them.
    torch.set_num_threads(1)
    # The garbage collector writes to every object that it inspects, and a written page is copied.
    gc.freeze()

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None, "a worker has a parent"
        parent.join()
        os._exit(1)

    in_thread(wait)


# ---- Progress of a preparation: a bar on a terminal, occasional lines elsewhere ------------------


class _Bar(tqdm):
    """Bar without tqdm's thread, which would outlive it: processes that fork must have one thread."""

    monitor_interval = 0


@dataclass(frozen=True, kw_only=True)
class Reporter:
    """Output of progress.

    Attributes:
        say: Function that takes a line of text.
        bars: Show bars on standard error, if it is a terminal.
    """

    say: Callable[[str], None]
    bars: bool

    @contextlib.contextmanager
    def bar(self, verb: str, total: int) -> Iterator[Callable[[int], object]]:
        """Show progress, and yield a function to call with every number of bytes done.

        The bar is full after ``total`` bytes.
        """
        with _Bar(
            total=total,
            desc=verb,
            unit="B",
            unit_scale=True,
            leave=False,
            disable=None if self.bars else True,  # None: only on a terminal
        ) as bar:
            yield self._lines(verb, total) if bar.disable else bar.update

    def _lines(self, verb: str, total: int) -> Callable[[int], None]:
        """Return a function that says a line at every tenth of the total."""
        reached = 0

        def advance(done: int) -> None:
            nonlocal reached
            before = reached
            reached += done
            tenth = 10 * reached // max(total, 1)
            if 10 * before // max(total, 1) < tenth < 10:
                self.say(f"{verb}: {10 * tenth} % of {total / 1e6:,.1f} MB")

        return advance
