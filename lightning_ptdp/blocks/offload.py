"""Activation offload: a block's saved activations stay in host memory until its backward.

A block is sent while the next one runs forward. It is fetched while the block after it runs
backward. The device therefore holds two blocks of a microbatch instead of all, and copies overlap
with computation::

    forward     block 0 | block 1  | block 2  |                    backward   block 2 | block 1 | block 0
    copies              | 0 to host| 1 to host|  (2 stays)         copies     1 back  | 0 back  |

Storages are copied, so that queries, keys and values that are views of one product are copied once.
These tensors of a block stay on the device: parameters and buffers, the block's arguments after its
first tensor (masks and rotary tables, which all blocks share), autocast's copies of weights (they
are views of a transposed matrix), and tensors smaller than an eighth of the first tensor.

On CUDA a copy is only queued. No tensor is overwritten while it is copied, for these reasons:

- All copies are queued on one separate stream, so that they never overtake one another.
- To the host: the copying stream waits for the computing stream first. The block's storages are
  held until the next block has run. They are released only after the computing stream was made to
  wait for the copies. A later owner of the memory therefore writes after them. (With
  ``record_stream`` instead, memory would be freed only at the host's next check, and the host runs
  ahead by a whole forward.)
- From the host: the computing stream allocates the memory, and the copying stream waits for that.
  The memory is held until a backward makes the computing stream wait for the copy. If none does,
  ``record_stream`` prevents reuse of the memory before the end of the copy.
- Pinned memory comes from torch's pool. The pool reuses freed memory only after the copies queued
  before are finished. It rounds sizes up to powers of two, and keeps the memory until the process
  ends.

A backward that needs a tensor that was written to while it was on the device is refused, as by
autograd without hooks. On a CPU the copies are made at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.base.saved_tensors import checked, written_refusal
from lightning_ptdp.forward.own_forward import OwnForward
from lightning_ptdp.forward.surroundings import Context
from lightning_ptdp.pipeline.crossing import tensors_in
from lightning_ptdp.shims.torch import untraced

_SMALL = 1 / 8
_VIEW = 1 / 4


@dataclass(frozen=True, eq=False, kw_only=True)
class Offloaded(OwnForward):
    """Forward of a block whose activations leave the device.

    Attributes:
        offload: Store of the activations.
        layer: The block's number.
        sends: Whether the block's own activations are sent; otherwise it only releases those of the
            block before.
    """

    offload: Offload
    layer: int
    sends: bool

    @untraced  # the compiled forward is inside
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's forward."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        staying = self._staying((*args, *kwargs.values())) if self.sends else None
        # Nothing runs twice. Deferred gradients of modules with hooks recognize blocks by the first
        # of the two contexts.
        context = (
            self.surroundings.recomputation()[0]
            if self.surroundings is not None
            else contextlib.nullcontext()
        )
        with self.offload.around(self.layer, staying), context:
            return self.original(*args, **kwargs)

    def _staying(self, inputs: tuple[Any, ...]) -> _Staying | None:
        tensors = [tensor for _, tensor in tensors_in(inputs)]
        if not tensors:
            return None
        first = tensors[0]
        weights = [*dict(nn.Module.named_parameters(self.module)).values(), *self.module.buffers()]
        storages = {tensor.untyped_storage().data_ptr() for tensor in (*weights, *tensors[1:])}
        return _Staying(
            device=first.device,
            storages=storages - {first.untyped_storage().data_ptr()},
            matrices={tuple(tensor.shape) for tensor in weights if tensor.dim() == 2},
            first=first.nbytes,
        )


@dataclass(frozen=True, kw_only=True)
class _Staying:
    """Tensors of a block that are not sent.

    Attributes:
        device: Device of the block; tensors on another device stay.
        storages: Addresses of storages that other objects hold.
        matrices: Shapes of the block's matrices, to recognize autocast's copies of them.
        first: Bytes of the block's first tensor.
    """

    device: torch.device
    storages: Collection[int]
    matrices: Collection[tuple[int, ...]]
    first: int

    def holds(self, tensor: Tensor) -> bool:
        """Return True if the tensor stays."""
        if (
            type(tensor) is not Tensor
            or tensor.device != self.device
            or tensor.is_meta
            or tensor.layout is not torch.strided
        ):
            return True
        if tensor.is_complex() or tensor.is_neg() or tensor.nbytes < _SMALL * self.first:
            return True
        is_transposed = (
            tensor.dim() == 2
            and not tensor.is_contiguous()
            and tuple(reversed(tensor.shape)) in self.matrices
        )
        return is_transposed or tensor.untyped_storage().data_ptr() in self.storages


class Offload:
    """Saved tensors of the blocks of one rank."""

    def __init__(self) -> None:
        self._last: _Block | None = None
        self._stream: torch.cuda.Stream | None = None

    def __reduce__(self) -> tuple[type[Offload], tuple[()]]:
        """Return the recipe of an empty object: a copy has no tensors in transit."""
        return Offload, ()

    @contextlib.contextmanager
    def around(self, layer: int, staying: _Staying | None) -> Iterator[None]:
        """Surround the forward of a block.

        Args:
            layer: The block's number. If the block with the number before ran last, it is fetched
                when this block's backward begins.
            staying: Tensors that are not sent; None: all tensors stay.
        """
        leaving = self._last
        if leaving is not None:
            leaving.send()
        self._last = None
        hooks: Context = contextlib.nullcontext()
        if staying is not None:
            before = leaving if leaving is not None and leaving.layer == layer - 1 else None
            self._last = block = _Block(
                layer, staying, before, self._copying_stream(staying.device)
            )
            hooks = torch.autograd.graph.saved_tensors_hooks(block.pack, block.unpack)
        try:
            with hooks:
                yield
        finally:
            if leaving is not None:
                leaving.release()

    def _copying_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if self._stream is None and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        return self._stream


@dataclass(eq=False)
class _Block:
    """Saved tensors of one call of a block: on the device, sent, or fetched."""

    layer: int
    staying: _Staying
    before: _Block | None
    stream: torch.cuda.Stream | None
    _storages: dict[tuple[int, int], weakref.ref[_Storage]] = field(default_factory=dict)
    _leaving: list[_Storage] = field(default_factory=list)
    _arriving: list[_Storage] = field(default_factory=list)
    _wanted: bool = False
    _done: torch.cuda.Event | None = None

    def pack(self, tensor: Tensor) -> Callable[[], Tensor] | _Saved:
        """Return a replacement of a tensor that autograd saves."""
        if self.staying.holds(tensor):
            return checked(tensor)
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), tensor._version
        reference = self._storages.get(key)
        stored = reference() if reference is not None else None
        if stored is None:
            if tensor.nbytes < _VIEW * storage.nbytes():
                return checked(tensor)
            on_device = tensor.new_empty(0, dtype=torch.uint8).set_(storage)
            stored = _Storage(on_device.numel(), tensor._version, on_device)
            self._storages[key] = weakref.ref(stored)
        stored.saved.append(tensor)
        return _Saved(
            stored, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
        )

    def unpack(self, saved: Callable[[], Tensor] | _Saved) -> Tensor:
        """Return the tensor when autograd needs it."""
        if not isinstance(saved, _Saved):
            return saved()
        self.fetch()
        if self._done is not None:
            torch.cuda.current_stream(self.staying.device).wait_event(self._done)
        self._arriving = []
        if self.before is not None:
            self.before.fetch()
        return saved.tensor()

    def send(self) -> None:
        """Start to copy to the host."""
        if self._wanted:
            return
        self._leaving = self._alive()
        with self._copying():
            for storage in self._leaving:
                storage.host = torch.empty(
                    storage.nbytes, dtype=torch.uint8, pin_memory=self.stream is not None
                )
                storage.host.copy_(storage.on_device, non_blocking=True)

    def release(self) -> None:
        """Release the memory of tensors that have been copied.

        A backward inside the next block's forward may have fetched them already; then they stay.
        """
        if self._done is not None:
            torch.cuda.current_stream(self.staying.device).wait_event(self._done)
        if not self._wanted:
            for storage in self._leaving:
                storage.leave()
        self._leaving = []

    def fetch(self) -> None:
        """Start to copy tensors on the host back to the device, once."""
        if self._wanted:
            return
        self._wanted = True
        missing = [storage for storage in self._alive() if storage.device is None]
        for storage in missing:
            storage.device = torch.empty(
                storage.nbytes, dtype=torch.uint8, device=self.staying.device
            )
        with self._copying():
            for storage in missing:
                assert storage.host is not None
                storage.on_device.copy_(storage.host, non_blocking=True)
        self._arriving = missing

    def __del__(self) -> None:
        """Keep the memory of copies that no backward has waited for until they end."""
        if self.stream is None:
            return
        for storage in self._arriving:
            storage.on_device.record_stream(self.stream)

    def _alive(self) -> list[_Storage]:
        return [
            storage for reference in self._storages.values() if (storage := reference()) is not None
        ]

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """Queue copies after the computation so far, in parallel to later computation."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.staying.device))
        with torch.cuda.stream(self.stream):
            yield
        self._done = self.stream.record_event()


@dataclass(eq=False)
class _Storage:
    """Bytes on the device, on the host, or both.

    Attributes:
        version: Number of writes to the saved tensors before they were saved.
        saved: The tensors, while they are on the device.
        is_changed: True if one has been written to afterwards.
    """

    nbytes: int
    version: int
    device: Tensor | None
    host: Tensor | None = None
    saved: list[Tensor] = field(default_factory=list)
    is_changed: bool = False

    def note_writes(self) -> None:
        """Note writes to the saved tensors."""
        self.is_changed |= any(tensor._version != self.version for tensor in self.saved)

    def leave(self) -> None:
        """Leave the device."""
        self.note_writes()
        self.saved.clear()
        self.device = None

    @property
    def on_device(self) -> Tensor:
        """Return the tensor, which must be on the device by now."""
        assert self.device is not None
        return self.device


@dataclass(frozen=True)
class _Saved:
    """A view of a storage that may be on the host."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """Return the tensor as it was saved."""
        self.storage.note_writes()
        if self.storage.is_changed:
            raise written_refusal(self.shape)
        source = self.storage.on_device.untyped_storage()
        return torch.empty(0, dtype=self.dtype, device=source.device).set_(
            source, self.offset, self.shape, self.stride
        )
