"""Peak memory of tensors on a CPU, counted.

The peak of the process would include the interpreter, the libraries and memory that the C library
keeps."""

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
    """Context that counts the memory of living tensors after each operation.

    ``peak_bytes`` is the largest count. Tensors of less than 1 KiB are left out. torch's profiler
    is not used, because it does not see tensors freed by threads that communicate."""

    def __init__(self) -> None:
        super().__init__()
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}
        self._held = self.peak_bytes = 0

    def __enter__(self) -> CountedMemory:
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # isinstance accesses lazy attributes of modules
            tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
        self._see(tensors)
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the operation's result, and count its tensors."""
        result = func(*args, **(kwargs or {}))
        self._see(iterate_tensors(result))
        return result

    def _see(self, tensors: Any) -> None:
        for tensor in tensors:
            if (
                tensor.layout != torch.strided
                # not of the tensor: one without data, of the planner's traces, names a CPU
                or tensor.untyped_storage().device.type != "cpu"
                or (nbytes := tensor.untyped_storage().nbytes()) < _LEAST
            ):
                continue
            found = StorageWeakRef(tensor.untyped_storage())
            if found.cdata not in self._there:
                self._there[found.cdata] = found, nbytes
                self._held += nbytes
        if self._held > self.peak_bytes:  # only then do freed tensors matter
            for key in [key for key, (storage, _) in self._there.items() if storage.expired()]:
                self._held -= self._there.pop(key)[1]
            self.peak_bytes = max(self.peak_bytes, self._held)
