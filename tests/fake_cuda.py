"""A fake GPU: its tensors report "cuda", but are computed on the CPU.

Every operation for which the host would wait for the device is recorded. Tensors on the device are
identified by their storage. Mixing tensors of both devices is an error, as on a GPU. So is memory
that is freed after a use on a stream other than that of its allocation, if neither ``record_stream``
was called nor the stream of the allocation has waited: torch's allocator would reuse the memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_ptdp
from lightning_ptdp.data_parallel import absent_parameters
from lightning_ptdp.forward import fused

__all__ = ["Wait", "Waits", "fake_cuda"]

_TORCH, _MOCK = os.path.dirname(torch.__file__) + os.sep, os.path.dirname(mock.__file__) + os.sep
_PACKAGE = str(Path(lightning_ptdp.__file__).parent) + os.sep
_CPU, _DEVICE, _TO = torch.device("cpu"), torch.Tensor.device.__get__, torch.Tensor.to
_READS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}
"""Operations whose values or result sizes the host has to read."""
_NONDETERMINISTIC = {
    "histc",
    "put",
    "put_",
    "median",
    "nanmedian",
    "kthvalue",
    "scatter_reduce",
    "scatter_reduce_",
    "nll_loss2d_forward",
    "max_unpool2d",
    "max_unpool3d",
    "_ctc_loss_backward",
    "avg_pool3d_backward",
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward",
    "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward",
    "upsample_linear1d_backward",
    "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward",
    "upsample_trilinear3d_backward",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d_backward",
    "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
}
"""Operations that a GPU refuses with ``torch.use_deterministic_algorithms(True)``.

From the list in torch's documentation of that function. Floating-point ``cumsum`` was on the list
until torch got a deterministic kernel; it is refused too. ``bincount`` is listed only with weights.
"""
_INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}
_MOVES = {"_to_copy", "copy_"}


@dataclass(frozen=True, order=True)
class Wait:
    """One wait of the host for the device.

    Attributes:
        what: The operation.
        place: Calling file and function, e.g. "engine/step_report.py read_numbers".
        in_schedule: True between the first and the last action of a schedule.
        queued: Number of operations that the default stream was given and the wait does not cover,
            because it is on another stream.
    """

    what: str
    place: str
    in_schedule: bool = False
    queued: int = 0


@dataclass
class Waits:
    """Record of a rank's waits.

    Attributes:
        batches: One list per batch; the first holds the waits before all batches.
    """

    batches: list[list[Wait]] = field(default_factory=lambda: [[]])

    @property
    def count(self) -> int:
        """Number of waits in all batches."""
        return sum(map(len, self.batches))

    def note(self, what: str, queued: int = 0) -> None:
        """Record a wait with its caller."""
        place, in_schedule, frame = "", False, sys._getframe(1)
        while frame is not None:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            ours = file.startswith(_PACKAGE)
            if not place and file != __file__ and not file.startswith((_TORCH, _MOCK)):
                if name in ("wait", "advance"):
                    return  # gloo's own copy after a collective
                place = f"{file[len(_PACKAGE) :] if ours else file} {name}"
            in_schedule |= ours and file.endswith("pipeline/runtime.py") and name == "run"
            frame = frame.f_back
        self.batches[-1].append(Wait(what, place, in_schedule, queued))


@dataclass
class _Memory:
    """Storages on the device, kept alive so that no address is reused."""

    device: torch.device
    waits: Waits
    held: dict[int, Any] = field(default_factory=dict)
    streams: _Streams = field(default_factory=lambda: _Streams())
    _copies_to_host: int = 0

    def has(self, tensor: object) -> bool:
        return (
            isinstance(tensor, Tensor)
            and tensor.layout is torch.strided
            and tensor.untyped_storage()._cdata in self.held
        )

    def move(self, copy: Callable[[], Tensor], *, to_host: bool, waits: bool) -> Tensor:
        """Return the copy that ``copy`` makes on the other device.

        The host waits for the copy if ``waits`` is set and the tensor is not empty.
        """
        self._copies_to_host += to_host
        try:
            made = copy()
        finally:
            self._copies_to_host -= to_host
        if waits and made.numel():
            self.waits.note("copy to the host" if to_host else "copy from the host")
        if not to_host:
            self.put(made)
        return made

    def put(self, made: object) -> None:
        if self._copies_to_host:
            return
        for tensor in _tensors(made):
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self.held[storage._cdata] = storage
                self.streams.owners.setdefault(storage._cdata, self.streams.current)


@dataclass
class _Streams:
    """Streams that allocated and used memory.

    Attributes:
        current: The current stream.
        owners: Stream that allocated a storage, by its address.
        uses: Uses on other streams, which may be running when the memory is free: (address, stream)
            -> operation.
        default: The default stream.
        queued: Number of operations on the default stream.
        seen: ``queued`` when another stream last waited for the default stream.
    """

    current: Any = None
    default: Any = None
    queued: int = 0
    seen: dict[Any, int] = field(default_factory=dict)
    owners: dict[int, Any] = field(default_factory=dict)
    uses: dict[tuple[int, Any], str] = field(default_factory=dict)

    @contextlib.contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        outer, self.current = self.current, stream
        yield
        self.current = outer

    def use(self, tensors: list[Tensor], name: str) -> None:
        self.queued += self.current is self.default
        for address in (tensor.untyped_storage()._cdata for tensor in tensors):
            if self.owners[address] is not self.current:
                self.uses[address, self.current] = name

    def read(self) -> int:
        """Let the host wait for the current stream; return what it does not wait for."""
        for use in [use for use in self.uses if use[1] is self.current]:
            del self.uses[use]
        if self.current is self.default:
            return 0
        return self.queued - self.seen.get(self.current, 0)

    def recorded(self, tensor: Tensor, stream: Any) -> None:
        self.uses.pop((tensor.untyped_storage()._cdata, stream), None)

    def waited(self, stream: Any, other: Any) -> None:
        """Forget the uses on ``other`` of memory of ``stream``, which has waited for them.

        Memory that was already free must not have such uses.
        """
        if other is self.default:
            self.seen[stream] = self.queued
        for address, used_on in list(self.uses):
            if used_on is other and self.owners[address] is stream:
                name = self.uses.pop((address, used_on))
                if torch._C._storage_Use_Count(address) == 1:  # the reference in ``held``
                    raise RuntimeError(f"memory that {name} uses on another stream was freed")


def _claims(memory: _Memory) -> dict[str, Any]:
    """Return replacements of ``Tensor`` attributes for the fake device.

    They report a tensor's device, move the tensor, and record reads by the host.
    """

    def moved(
        tensor: Tensor,
        device: torch.device | None,
        dtype: Any,
        non_blocking: bool,
        copy: bool,
        form: Any,
    ) -> Tensor:
        here, options = memory.has(tensor), {} if form is None else {"memory_format": form}
        kind = device.type if device is not None else "cuda" if here else "cpu"
        dtype = tensor.dtype if dtype is None else dtype
        if "meta" in (kind, _DEVICE(tensor).type) or here == (kind == "cuda"):
            return _TO(
                tensor,
                "meta" if kind == "meta" else _DEVICE(tensor),
                dtype,
                non_blocking,
                copy,
                **options,
            )
        return memory.move(
            lambda: _TO(tensor, dtype, False, True, **options), to_host=here, waits=not non_blocking
        )

    def to(tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        if args and isinstance(args[-1], bool) and isinstance(args[-2], bool):
            *args, copy = args
        device, dtype, non_blocking, form = torch._C._nn._parse_to(*args, **kwargs)
        return moved(tensor, device, dtype, non_blocking, copy, form)

    def cuda(tensor: Tensor, *_: Any, non_blocking: bool = False) -> Tensor:
        return moved(tensor, memory.device, None, non_blocking, False, None)

    def read(name: str) -> Callable[..., Any]:
        function = getattr(Tensor, name)

        def reading(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if memory.has(tensor):
                memory.waits.note(name, memory.streams.read())
            return function(tensor, *args, **kwargs)

        return reading

    return {
        "device": property(lambda tensor: memory.device if memory.has(tensor) else _DEVICE(tensor)),
        "is_cuda": property(memory.has),
        "is_cpu": property(lambda tensor: not memory.has(tensor) and _DEVICE(tensor).type == "cpu"),
        "get_device": lambda tensor: memory.device.index if memory.has(tensor) else -1,
        "to": to,
        "cuda": cuda,
        "new_tensor": lambda tensor, data, **options: torch.tensor(
            data, **{"dtype": tensor.dtype, "device": tensor.device, **options}
        ),
        "cpu": lambda tensor: moved(tensor, _CPU, None, False, False, None),
        **{name: read(name) for name in ("tolist", "numpy", "__repr__", "__array__")},
    }


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors in the arguments or results of an operation.

    An operation has no other containers; ``tree_iter`` would take most of the time of a test.
    """
    if isinstance(values, Tensor):
        return [values]
    nested = values if isinstance(values, list | tuple) else ()
    return [tensor for value in nested for tensor in _tensors(value)]


@functools.cache
def _has_out_dtype(function: Any) -> bool:
    return any(argument.name == "out_dtype" for argument in function._schema.arguments)


class _Notes(TorchDispatchMode):
    """Dispatch mode that places results on the fake device and records host waits.

    A result is on the device if the call requests it or if an operand is on the device.
    """

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, memory, name = dict(kwargs or {}), self._memory, function.overloadpacket.__name__
        asked = kwargs.get("device")
        if on_device := asked is not None and asked.type == "cuda":
            kwargs["device"] = _CPU
        tensors = _tensors((*args, *kwargs.values()))
        here = [tensor for tensor in tensors if memory.has(tensor)]
        memory.streams.use(here, name)
        if name == "_to_copy" and on_device and not here:
            return memory.move(
                lambda: function(*args, **kwargs),
                to_host=False,
                waits=not kwargs.get("non_blocking"),
            )
        if here and any(
            tensor.dim() and not memory.has(tensor) and tensor.device.type == "cpu"
            for tensor in tensors
        ):
            self._mixed(function, args, kwargs)
        if here and torch.are_deterministic_algorithms_enabled():
            _refuse_nondeterministic(name, args, kwargs)
        if name in _READS and here:
            memory.waits.note("item" if name == "_local_scalar_dense" else name)
        if (
            name in _INDEXES
            and here
            and any(isinstance(index, Tensor) and index.dtype is torch.bool for index in args[1])
        ):
            memory.waits.note("nonzero")
        widens = here and _has_out_dtype(function) and any(isinstance(a, torch.dtype) for a in args)
        run = functools.partial(_in_float, function) if widens else function
        made = run(*args, **kwargs)
        if name != "copy_" and (on_device or (here and (asked is None or name == "_to_copy"))):
            memory.put(made)
        return made

    def _mixed(self, function: Any, args: Any, kwargs: Any) -> None:
        """Record the wait of an operation on both devices, or refuse it."""
        name = function.overloadpacket.__name__
        if name == "copy_":
            to_host = self._memory.has(args[1])
            # The host changes the dtype, after a copy to memory that is not locked.
            changes = to_host and args[0].dtype != args[1].dtype
            if changes or (not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking")):
                self._memory.waits.note("copy to the host" if to_host else "copy from the host")
        elif name in _INDEXES:
            self._memory.waits.note("copy from the host")
        elif function.namespace != "c10d":
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found both cuda and "
                "cpu"
            )


def _refuse_nondeterministic(name: str, args: Any, kwargs: Any) -> None:
    """Raise a GPU's error for an operation without a deterministic kernel."""
    refused = name in _NONDETERMINISTIC and len(args) > (1 if "median" in name else 0)
    if name in ("scatter_reduce", "scatter_reduce_"):
        refused = args[4] not in ("sum", "mean")
    if name == "cumsum":
        refused = kwargs.get("dtype", args[0].dtype).is_floating_point
    if name == "bincount":
        refused = len(args) > 1 and args[1] is not None
    if refused:
        raise RuntimeError(
            f"{name} does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'"
        )


@contextlib.contextmanager
def fake_cuda(rank: int) -> Iterator[Waits]:
    """Provide fake GPUs, which a Trainer with ``accelerator="gpu"`` uses."""
    memory = _Memory(torch.device("cuda", rank), Waits())
    group_tensors = torch._C._group_tensors_by_device_and_dtype

    def grouped(lists: Any, *args: Any) -> Any:
        groups = group_tensors(lists, *args)
        return {(found[0][0][0].device, dtype): found for (_, dtype), found in groups.items()}

    with contextlib.ExitStack() as stack:
        # torch caches the constructors that `torch.device` changes: those replaced here, too
        _device_constructors.cache_clear()
        stack.callback(_device_constructors.cache_clear)
        for name, stub in _stubs(memory).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stub))
        stack.enter_context(
            mock.patch.object(torch.accelerator, "current_stream", torch.cuda.current_stream)
        )
        stack.enter_context(mock.patch.object(torch.futures, "Future", _Future))
        stack.enter_context(
            mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", grouped)
        )
        for name, claim in _claims(memory).items():
            stack.enter_context(mock.patch.object(Tensor, name, claim))
        claimed = {getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu")}
        metadata = absent_parameters._METADATA | claimed
        stack.enter_context(mock.patch.object(absent_parameters, "_METADATA", metadata))
        moves = {Tensor.to, Tensor.cpu, Tensor.cuda}
        for name, functions in {"_MOVES": moves, "_CONVERSIONS": moves}.items():
            patched = getattr(absent_parameters, name) | functions
            stack.enter_context(mock.patch.object(absent_parameters, name, patched))
        stack.enter_context(
            mock.patch.object(Tensor, "record_stream", lambda *used: memory.streams.recorded(*used))
        )
        for name in ("tensor", "as_tensor"):
            stack.enter_context(mock.patch.object(torch, name, _made_on_host(getattr(torch, name))))
        for name in ("broadcast_object_list", "all_gather_object"):
            stack.enter_context(mock.patch.object(dist, name, _noted(name, memory.waits)))
        # A compiler would need a real device.
        stack.enter_context(mock.patch.object(fused, "_compiled", lambda function: function))
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(_Notes(memory))
        yield memory.waits
        assert not memory.streams.uses, f"reused too early: {[*memory.streams.uses.values()]}"


def _in_float(function: Any, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Compute a half-precision product with a float32 result, which CPUs lack."""
    (dtype,) = (value for value in args if isinstance(value, torch.dtype))
    wide = [
        value.to(dtype) if isinstance(value, Tensor) else value
        for value in args
        if value is not dtype
    ]
    made: Tensor = function.overloadpacket(*wide, **kwargs)
    return made if out is None else out.copy_(made)


class _Future(torch.futures.Future):
    """Future without device events."""

    def __init__(self, *, devices: object = None) -> None:
        super().__init__()


def _made_on_host(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a constructor to create a tensor on the host and move it to the device."""

    def make(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        if isinstance(data, Tensor) and function is not torch.tensor:
            return data.to(
                data.device if device is None else device, kwargs.get("dtype") or data.dtype
            )
        made = function(data, **kwargs)
        return made if device is None else made.to(device)

    return make


def _noted(name: str, waits: Waits) -> Callable[..., Any]:
    function = getattr(dist, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        waits.note(name)
        return function(*args, **kwargs)

    return run


def _stubs(memory: _Memory) -> dict[str, Any]:
    """Return replacements of functions of torch.cuda."""
    device, waits, streams = memory.device, memory.waits, memory.streams
    state = torch.zeros(16, dtype=torch.uint8)

    class Stream:
        """Stream or event whose queued work is always complete."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.device, self._at, self.stream = device, -1, self

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: object) -> None: ...

        def synchronize(self) -> None:
            # Otherwise the host has already waited for the whole device since.
            if self._at in (
                -1,
                waits.count,
            ):
                waits.note("synchronize")

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return False

        def record(self, stream: Any = None) -> None:
            self._at, self.stream = waits.count, stream or streams.current

        def wait(self, stream: Any = None) -> None:
            streams.waited(stream or streams.current, self.stream)

        def wait_stream(self, other: Any) -> None:
            streams.waited(self, other)

        def wait_event(self, event: Any) -> None:
            streams.waited(self, event.stream)

        def record_event(self, event: Any = None) -> Any:
            event = event or Stream()
            event.stream = self
            return event

        def elapsed_time(self, *_: Any) -> float:
            return 0.0

    one = streams.current = streams.default = Stream()
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: 64,
        "current_device": lambda: device.index,
        "set_device": lambda *_: None,
        "device": lambda *_: contextlib.nullcontext(),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "fake",
        "get_device_properties": lambda *_: SimpleNamespace(
            name="fake", total_memory=80 * 2**30, major=9, minor=0
        ),
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": lambda: None,
        "get_rng_state": lambda *_: state,
        "set_rng_state": lambda *_: None,
        "manual_seed": lambda *_: None,
        "manual_seed_all": lambda *_: None,
        "Stream": Stream,
        "Event": Stream,
        "stream": streams.entered,
        "current_stream": lambda *_: streams.current,
        "default_stream": lambda *_: one,
        "synchronize": lambda *_: waits.note("synchronize"),
    }
