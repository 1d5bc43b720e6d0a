"""Copies of tensors in the memory of the host, which stay there until the next copies."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["HostCopies"]

_ALIGNMENT = 64  # bytes; at least the size of an element of any type


class HostCopies:
    """One buffer of the size of all tensors that are copied.

    Under CUDA its pages are locked, so that copies run at the speed of the bus. They are locked by
    ``cudaHostRegister``, because ``pin_memory=True`` takes a power of two of bytes. Where the driver
    refuses, copies are right but slower.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._unlock: weakref.finalize | None = None

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors, complete at the return.

        They are valid until the next call or ``release``.
        """
        is_cuda = any(tensor.is_cuda for tensor in tensors.values())
        sizes = (-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values())
        *begins, total = accumulate(sizes, initial=0)
        if total != len(self._buffer):
            self._allocate(total, lock=is_cuda)
        copies: dict[str, Tensor] = {}
        for (name, tensor), begin in zip(tensors.items(), begins, strict=True):
            memory = self._buffer[begin : begin + tensor.nbytes]
            copy = memory.view(tensor.dtype).view(tensor.shape)
            copies[name] = copy.copy_(tensor.detach(), non_blocking=True)
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
            runtime, place = torch.cuda.cudart(), self._buffer.data_ptr()
            if int(runtime.cudaHostRegister(place, total, 0)) == 0:
                self._unlock = weakref.finalize(self, runtime.cudaHostUnregister, place)
