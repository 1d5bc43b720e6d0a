"""Saving during training: the training loop waits only for the copy to host memory."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import accumulate
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.base.checked_json import Json
from lightning_ptdp.base.time_limit import in_thread
from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.data_files import Assignment, assign
from lightning_ptdp.checkpoint.local_rectangles import Tensors, cut_strips, rectangles_of
from lightning_ptdp.checkpoint.remote_path import PathLike, Place
from lightning_ptdp.checkpoint.save import checked_content, save_rectangles, state_rectangles
from lightning_ptdp.checkpoint.save_agreement import CheckpointError, has_groups, same_outcome
from lightning_ptdp.checkpoint.save_folders import SaveFolders
from lightning_ptdp.checkpoint.tagged_json import Encoded

_EXIT_PRIORITY = 20  # before the logger's
_TELL_S = 2.0


class BackgroundSaver:
    """Saver of one checkpoint at a time, in its own thread and with its own process group.

    All ranks must make the same calls. At exit, the process waits for the save, unless a signal
    that Python does not handle ends it.

    The memory of the copies is kept between saves (see ``HostCopies``). A rank copies only what it
    writes, so replicas divide the copies among themselves.

    Args:
        limit: Limit of every wait for another rank; a save must end within twice this time.
        folders: Record of the run's checkpoint folders; None: a new record.
        group: gloo group of the ranks that write one checkpoint together, used by nothing else;
            None: a new group of all ranks.
    """

    def __init__(
        self,
        *,
        limit: timedelta,
        folders: SaveFolders | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._limit, self._folders = limit, folders or SaveFolders()
        self._group: Any = group
        if group is None and has_groups():
            self._group = dist.new_group(backend="gloo", timeout=limit)
        self._copies = HostCopies()
        self._assignment: Assignment | None = None
        self._saving: Future[None] | None = None
        self._lock = threading.Lock()
        self._then: list[Callable[[], object]] | None = None  # None: no save is running
        self._target: Place = Path()
        # At exit, Python does not join daemon threads, and joins other threads without a time
        # limit. Processes of multiprocessing do not run atexit functions.
        self._at_exit = util.Finalize(None, self._finish, exitpriority=_EXIT_PRIORITY)

    def save(
        self,
        path: PathLike,
        *,
        tensors: Tensors,
        state: dict[str, Any],
        metadata: Mapping[str, Json],
        then: Callable[[], object],
    ) -> None:
        """Save like :func:`save_checkpoint`, but return as soon as everything is copied.

        The call first waits for the previous save.

        Args:
            path: The folder to create.
            tensors: As for :func:`save_checkpoint`; they may be changed as soon as this call
                returns.
            state: As for :func:`save_checkpoint`.
            metadata: As for :func:`save_checkpoint`.
            then: Function that the thread calls when the checkpoint is complete.

        Raises:
            CheckpointError: The previous save failed, or this one cannot succeed. Raised on all
                ranks.
            RuntimeError: As for :meth:`wait`.
        """
        self.wait()
        self._target = files.absolute(path)
        content = checked_content(path, state=state, metadata=metadata, group=self._group)
        doing = f"copying the tensors of the checkpoint {path}"
        with same_outcome(doing, self._group):
            rectangles = [*rectangles_of(tensors), *state_rectangles(content)]
        assignment = assign(
            cut_strips(rectangles), doing=doing, group=self._group, known=self._assignment
        )
        self._assignment = None  # its values would keep a previous buffer of another size
        with same_outcome(doing, self._group):
            copies = self._copies([one.values for one in assignment.rectangles])
        copied = [
            replace(one, values=copy)
            for one, copy in zip(assignment.rectangles, copies, strict=True)
        ]
        self._assignment = replace(assignment, rectangles=copied)  # do not keep the parameters
        self._then = [then]
        self._saving = in_thread(
            partial(self._write, self._assignment, content, metadata),
            name=f"save {self._target.name}",
        )

    def after(self, action: Callable[[], object]) -> None:
        """Call ``action`` when the current save is complete, or at once if no save is running.

        ``action`` is not called if the save fails.
        """
        with self._lock:
            if self._then is not None:
                self._then.append(action)
                return
        if self._saving is None or self._saving.exception() is None:
            action()

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait until the current save has ended.

        Raises:
            CheckpointError: The save failed, or did not end within the limit. The previous
                checkpoint is complete.
            RuntimeError: Another rank was lost meanwhile (the error of torch's communication).
        """
        # The limit is doubled, because the thread began its own waits for other ranks later than
        # this one, and their errors say more.
        seconds = (limit or 2 * self._limit).total_seconds()
        if self._saving is None:
            return
        try:
            error = self._saving.exception(seconds)
        except TimeoutError:
            raise CheckpointError(
                f"saving the checkpoint {self._target} did not end within {seconds:g} s"
            ) from None
        self._saving = None
        if isinstance(error, CheckpointError):
            raise CheckpointError(str(error)) from error
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the current save, and release the memory and the process group.

        Raises:
            CheckpointError: As for :meth:`wait`.
            RuntimeError: As for :meth:`wait`.
        """
        self.wait()
        self._copies.release()
        self._assignment = None
        self.give_up()

    def give_up(self) -> None:
        """Do not wait for the current save at the end of the process."""
        self._at_exit.cancel()

    def _finish(self) -> None:
        if self._saving is None:
            return
        if wait([self._saving], _TELL_S).not_done:
            limit = self._limit.total_seconds()
            print(
                f"waiting until the checkpoint {self._target} is complete, at most {limit:g} s",
                file=sys.stderr,
                flush=True,
            )
        try:
            self.wait()
        except (Exception, KeyboardInterrupt) as error:
            print(
                f"the checkpoint {self._target} was not saved: {str(error) or 'Ctrl-C'}",
                file=sys.stderr,
                flush=True,
            )

    def _write(
        self, assignment: Assignment, content: Encoded, metadata: Mapping[str, Json]
    ) -> None:
        try:
            save_rectangles(
                self._target,
                assignment=assignment,
                content=content,
                metadata=metadata,
                folders=self._folders,
                group=self._group,
            )
            while action := self._next():
                action()
        except BaseException:  # the next ``wait`` raises it in the main thread
            self._then = None
            raise

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            if self._then:
                return self._then.pop(0)
            self._then = None
            return None


# ---- Copies of tensors in the memory of the host, which stay there until the next copies ---------


_ALIGNMENT = 64  # bytes; at least the size of an element of any type


class HostCopies:
    """One buffer of the size of all tensors that are copied.

    Under CUDA its pages are locked, so that copies run at the speed of the bus. They are locked by
    ``cudaHostRegister``, because ``pin_memory=True`` takes a power of two of bytes. Where the
    driver refuses, copies are right but slower.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._unlock: weakref.finalize | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous copies of the tensors, complete at the return.

        They are valid until the next call or ``release``.
        """
        is_cuda = any(tensor.is_cuda for tensor in tensors)
        sizes = (-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
        *offsets, total = accumulate(sizes, initial=0)
        if total != len(self._buffer):
            self._allocate(total, lock=is_cuda)
        copies = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            memory = self._buffer[offset : offset + tensor.nbytes]
            copy = memory.view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor.detach(), non_blocking=True))
        if is_cuda:
            torch.cuda.synchronize()
        return copies

    def release(self) -> None:
        """Release the memory."""
        if self._unlock is not None:
            self._unlock()
        self._buffer, self._unlock = torch.empty(0, dtype=torch.uint8), None

    def _allocate(self, total: int, *, lock: bool) -> None:
        self.release()
        self._buffer = torch.empty(total, dtype=torch.uint8)
        if lock:
            runtime, pointer = torch.cuda.cudart(), self._buffer.data_ptr()
            if int(runtime.cudaHostRegister(pointer, total, 0)) == 0:
                self._unlock = weakref.finalize(self, runtime.cudaHostUnregister, pointer)
            else:
                # The next kernel raises the pending error; it must not be one of the training.
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device="cuda")
