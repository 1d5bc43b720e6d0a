"""Tracking of values that only the first stage has, through the code before the blocks.

Modules before the blocks belong to the first stage. On later stages, stubs return zeros for them,
and placeholder blocks ignore these zeros. But a model may use such an output for more: give it to
every block, add it to the blocks' result, log it. ``FirstStageValue`` marks these tensors and
everything computed from them, on every stage. The first stage thus knows which tensors the next one
cannot compute itself. That works with frozen weights and in evaluation too, where ``requires_grad``
gives no information. Zeros that would be used as if they were values are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_ptdp.base.nested import iterate_tensors, map_tensors
from lightning_ptdp.base.torch_calls import OF_FIRST, TorchCall
from lightning_ptdp.pipeline.crossing import StageError, substitute
from lightning_ptdp.shims.torch import storage_key

_INSTEAD = "_ptdp_instead"
_WRITES = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__"})
_READS = frozenset(
    {
        *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__"),
        *("__contains__", "__int__", "__float__", "__index__", "__reduce_ex__"),
    }
)


@dataclass(eq=False)
class Origin:
    """Origin of the foreign tensors of one run of a stage.

    Attributes:
        why: Error message if their values may not be used; None on the first stage, where the
            values are true.
        blocks_reached: Whether the blocks have been reached. Before that, every computed value may
            be an input of the blocks only.
        over: Whether the run has ended. A recomputation may still use the tensors.
        written: Plain tensors that foreign values were written into.
    """

    why: str | None = None
    blocks_reached: bool = False
    over: bool = False
    written: list[Tensor] = field(default_factory=list)

    def has_written(self, tensor: Tensor) -> bool:
        """Return True if ``tensor`` shares memory with one that has received foreign values."""
        if not self.written:
            return False
        memory = storage_key(tensor)
        return any(memory == storage_key(written) for written in self.written)


class FirstStageValue(Tensor):
    """A tensor with values on the first stage only; an ordinary tensor to the model's code.

    Attributes:
        origin: Origin of its values.
    """

    origin: Origin

    @classmethod
    def mark(cls, tensor: Tensor, origin: Origin) -> FirstStageValue:
        """Return ``tensor`` (same memory, same gradient) as a foreign tensor."""
        marked = tensor.as_subclass(cls)
        marked.origin = origin
        return marked

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        call = TorchCall(function, args, kwargs or {})
        kwargs = call.kwargs
        name = call.name
        sources = _foreign((args, kwargs))
        source = next((tensor for tensor in sources if tensor.origin.why is not None), sources[0])
        origin = source.origin
        if origin.why is not None and name in _READS and (origin.blocks_reached or origin.over):
            raise StageError(origin.why)
        if (
            origin.blocks_reached
            and not origin.over
            and any(replacement(tensor) is not None for tensor in sources)
        ):
            # The arguments of blocks have crossed, and may be used after the blocks as well.
            args, kwargs = (
                substitute(value, lambda _path, tensor: _instead(tensor))
                for value in (args, kwargs)
            )
            if not _foreign((args, kwargs)):
                return function(*args, **kwargs)
        result = super().__torch_function__(function, types, args, kwargs)
        is_second = name in OF_FIRST and not isinstance(args[0], FirstStageValue)
        if call.makes_new or is_second:
            return plain(result)
        outputs = _foreign(result)
        writes = name in _WRITES or call.changes_first
        if (
            origin.why is not None
            and (outputs or writes)
            and origin.blocks_reached
            and not origin.over
        ):
            raise StageError(origin.why)
        if writes and type(args[0]) is Tensor:
            origin.written.append(args[0])
        for tensor in outputs:
            if tensor is not source:
                tensor.origin = origin
                if name == "detach":  # recomputation detaches its arguments
                    put_instead(tensor, replacement(source))
        return result


def _foreign(value: object) -> list[FirstStageValue]:
    return [tensor for tensor in iterate_tensors(value) if isinstance(tensor, FirstStageValue)]


def plain(tensor: Tensor) -> Tensor:
    """Return the same tensor, including its gradient, as an ordinary tensor."""
    return tensor.as_subclass(Tensor) if isinstance(tensor, FirstStageValue) else tensor


def known(output: Any) -> Any:
    """Return the step's output on the last stage, as ordinary tensors.

    Raises:
        StageError: It contains a tensor whose values this stage does not have.
    """
    if not _foreign(output):
        return output
    return map_tensors(output, _known)


def _known(tensor: Tensor) -> Tensor:
    value = _instead(tensor)
    if isinstance(value, FirstStageValue) and value.origin.why is not None:
        raise StageError(value.origin.why)
    return plain(value)


def _instead(tensor: Tensor) -> Tensor:
    recorded = replacement(tensor) if isinstance(tensor, FirstStageValue) else None
    return tensor if recorded is None else recorded


def put_instead(tensor: Tensor, by: Tensor | None) -> None:
    """Record ``by``, which the blocks of this stage receive in place of ``tensor``.

    A recomputation must pass the same tensor to them.
    """
    setattr(tensor, _INSTEAD, by)


def replacement(tensor: Tensor) -> Tensor | None:
    """Return the tensor that ``put_instead`` recorded."""
    return getattr(tensor, _INSTEAD, None)
