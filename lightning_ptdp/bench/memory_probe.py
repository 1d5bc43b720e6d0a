"""The peak of what tensors take on a CPU, counted: a process's own peak has the interpreter, the
libraries and what the C library keeps."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ptdp.base.nested import iterate_tensors

__all__ = ["CountedMemory"]

_LEAST = 1024


class CountedMemory(TorchDispatchMode):
    """While it is entered, looks after each operation which memory of tensors is still there;
    ``peak_bytes`` is the most that was.

    Tensors of less than 1 KiB are left out. Some are freed by threads that communicate, of which
    torch's profiler does not know."""

    def __init__(self) -> None:
        super().__init__()
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}
        self._held = self.peak_bytes = 0

    def __enter__(self) -> CountedMemory:
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # isinstance looks at lazy attributes of modules
            tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
        self._see(tensors)
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation's result."""
        result = func(*args, **(kwargs or {}))
        self._see(iterate_tensors(result))
        return result

    def _see(self, tensors: Any) -> None:
        for tensor in tensors:
            if (
                tensor.device.type != "cpu"
                or tensor.layout != torch.strided
                or (nbytes := tensor.untyped_storage().nbytes()) < _LEAST
            ):
                continue
            found = StorageWeakRef(tensor.untyped_storage())
            if found.cdata not in self._there:
                self._there[found.cdata] = found, nbytes
                self._held += nbytes
        if self._held > self.peak_bytes:  # only then it matters what has gone
            for key in [key for key, (storage, _) in self._there.items() if storage.expired()]:
                self._held -= self._there.pop(key)[1]
            self.peak_bytes = max(self.peak_bytes, self._held)
