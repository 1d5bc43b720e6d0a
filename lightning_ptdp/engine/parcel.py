"""Objects on their way to other ranks: their tensors go as one message of bytes from device to device, what is left as a *form*, which
need not be sent again while it stays the same."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.tensor_parallel import gather_full

__all__ = ["TensorPlace", "empty_message", "pack", "tensors_of", "to_bytes", "unpack"]

_ALIGNMENT = 16


@dataclass(frozen=True)
class TensorPlace:
    """What stands for a tensor in a form.

    Attributes:
        on_cpu: It stays on the CPU, wherever the ranks' devices are.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool

    @property
    def room(self) -> int:
        """Bytes that it takes in the message."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        self.tensors.append(gather_full(value.detach()).contiguous())
        return len(self.tensors) - 1


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        return self._tensors[place]


def pack(value: Any) -> tuple[bytes, list[Tensor]]:
    """The form of ``value`` and its tensors, whole where they are split over the vocabulary (collective over the tensor group then).

    Raises:
        Exception: Whatever pickle raises for what cannot be sent.
    """
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    return file.getvalue(), packer.tensors


def unpack(form: bytes, tensors: Sequence[Tensor]) -> Any:
    """What was packed."""
    return _Unpacker(io.BytesIO(form), tensors).load()


def empty_message(places: Sequence[TensorPlace], device: torch.device) -> Tensor:
    """Where a message is received, (bytes) uint8."""
    return torch.empty(sum(place.room for place in places), dtype=torch.uint8, device=device)


def to_bytes(tensors: Sequence[Tensor], places: Sequence[TensorPlace], device: torch.device) -> Tensor:
    """The message, (bytes) uint8 on ``device``."""
    message, start = empty_message(places, device), 0
    for tensor, place in zip(tensors, places, strict=True):
        message[start : start + tensor.nbytes].copy_(tensor.flatten().view(torch.uint8))
        start += place.room
    return message


def tensors_of(message: Tensor, places: Sequence[TensorPlace]) -> list[Tensor]:
    """The tensors of a message, each with memory of its own."""
    tensors, start = [], 0
    for place in places:
        size = math.prod(place.shape) * place.dtype.itemsize
        tensor = message[start : start + size].view(place.dtype).view(place.shape).clone()
        tensors.append(tensor.cpu() if place.on_cpu else tensor)
        start += place.room
    return tensors
