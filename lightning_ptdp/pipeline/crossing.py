"""Tensors sent from one pipeline stage to the next, and the gradients that return.

A block may return one tensor or a nest of tuples, lists and dictionaries. Each of its tensors that
the next block receives crosses once. *Extras* cross as well: tensors from before the blocks that
blocks receive as further arguments (the memory of a cross attention, a relative bias), if the next
stage cannot compute them itself::

    x, y = block(x, y, memory=m)        tensors   x            y            m
                                        output    (At(0), At(1))
                                        extras    (("memory",), 2)

Values *collected* over the blocks of all stages so far cross too, so that the last stage has all of
them: outputs for sums over blocks, outputs for hooks, and values that a Hugging Face model captures
from its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_ptdp.base.errors import PTDPError

Path = tuple[int | str, ...]
"""Place of a tensor in a call: the argument's position or keyword, then indices and keys."""

Nest = TypeVar("Nest")


class StageError(PTDPError, RuntimeError):
    """The model's forward did something that a pipeline stage cannot support.

    The message says what happened and how to fix it.
    """


class StageExit(BaseException):
    """Exception that leaves the user's step at the end of a stage.

    It is a ``BaseException``, so that ``except Exception`` in user code does not catch it.
    """

    def __init__(self, crossing: Crossing) -> None:
        super().__init__("left the step at the end of a pipeline stage")
        self.crossing = crossing


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor without its values.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        differentiable: Whether a gradient comes back for it.
        replicated: Whether the tensor and its gradient are the same on all tensor-parallel ranks.
            This holds for a hidden state, but not for an attention bias, whose values or gradients
            are those of the rank's own heads.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = False
    replicated: bool = False

    @classmethod
    def of(
        cls, tensor: Tensor, *, differentiable: bool = False, replicated: bool = False
    ) -> TensorForm:
        """Return the form of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype, differentiable, replicated)

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


@dataclass(frozen=True, slots=True)
class At:
    """Marker in place of a tensor: its index in a crossing, or None if it does not cross."""

    index: int | None


@dataclass(frozen=True, kw_only=True)
class Form:
    """Everything that both sides must know about a crossing, except its values.

    Attributes:
        tensors: Forms of the tensors, in sending order.
        output: Output of the last block of the stage, with an ``At`` in place of each tensor.
        extras: Places of further arguments, and the index of the tensor for each.
        collected: The collected values with an ``At`` in place of each tensor; None for nothing.
        past: For each container whose blocks have all run, ``output`` and ``tensors`` of the output
            of its last block.
    """

    tensors: tuple[TensorForm, ...] = ()
    output: object = None
    extras: tuple[tuple[Path, int], ...] = ()
    collected: object = None
    past: tuple[Form, ...] = ()

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors)) or "no tensors"


@dataclass(frozen=True)
class Crossing:
    """Tensors that cross a stage boundary.

    They are activations with their form, or the gradients of a crossing's differentiable tensors.

    Attributes:
        tensors: The tensors, all distinct.
        form: Their form; for gradients only ``tensors`` is set.
    """

    tensors: tuple[Tensor, ...]
    form: Form = Form()

    @property
    def awaited(self) -> tuple[TensorForm, ...]:
        """Return the forms of the gradients that come back for it."""
        return tuple(form for form in self.form.tensors if form.differentiable)

    def pairs(self) -> Iterator[tuple[Tensor, TensorForm]]:
        """Return the tensors, each with its form."""
        return zip(self.tensors, self.form.tensors, strict=True)

    def entering(self, *, training: bool = True) -> Crossing:
        """Return the crossing for the next stage: the same values, detached from the graph.

        In training the differentiable tensors are leaves that collect gradients.
        """
        tensors = (
            t.detach().requires_grad_() if training and form.differentiable else t.detach()
            for t, form in self.pairs()
        )
        return Crossing(tuple(tensors), self.form)

    def writable(self) -> Crossing:
        """Return aliases of the received tensors that a block may modify in place.

        Autograd forbids in-place changes of leaves of the graph.
        """
        tensors = (
            _Alias.apply(tensor) if tensor.requires_grad else tensor for tensor in self.tensors
        )
        return Crossing(tuple(tensors), self.form)

    def roots(self) -> Roots:
        """Return the starting points of the backward, one for each awaited gradient.

        A starting point is None if the tensor needs no gradient. The result keeps no activation
        alive.
        """
        return tuple(
            get_gradient_edge(tensor) if tensor.requires_grad else None
            for tensor, form in self.pairs()
            if form.differentiable
        )

    def gradients(self) -> Crossing:
        """Return the gradients of the differentiable tensors that entered a stage.

        Call it after the stage's backward. A tensor without a gradient gets zeros.
        """
        inputs = [tensor for tensor, form in self.pairs() if form.differentiable]
        tensors = (
            tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            for tensor in inputs
        )
        return Crossing(tuple(tensors), Form(tensors=self.awaited))


class _Alias(torch.autograd.Function):
    """View of the same memory, with an autograd node above the leaf."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


Roots = tuple[Tensor | GradientEdge | None, ...]
"""Starting points of a stage's backward."""


def backward(roots: Roots, gradients: Crossing | None) -> None:
    """Run the backward of one stage.

    It starts from the stage's roots with the gradients that came back, or (None) from a scalar
    loss.
    """
    incoming = (None,) * len(roots) if gradients is None else gradients.tensors
    pairs = [
        (root, gradient) for root, gradient in zip(roots, incoming, strict=True) if root is not None
    ]
    starts: Any = [root for root, _ in pairs]
    if starts:
        torch.autograd.backward(starts, [gradient for _, gradient in pairs])


# ---- nests of tuples, lists and dictionaries -----------------------------------------------------


def tensors_in(value: object, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors of a nest with their places.

    Only plain tuples, lists and dictionaries are searched.
    """
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, item in _items(value):
        yield from tensors_in(item, (*path, key))


def substitute(value: Nest, change: Callable[[Path, Tensor], Tensor], path: Path = ()) -> Nest:
    """Return ``value`` with its tensors changed; the same object if nothing changes."""
    changed: Any = value
    entries = [(key, item, substitute(item, change, (*path, key))) for key, item in _items(value)]
    if isinstance(value, Tensor):
        changed = change(path, value)
    elif any(item is not new_item for _, item, new_item in entries):
        items = {key: new_item for key, _, new_item in entries}
        changed = {**value, **items} if isinstance(value, dict) else type(changed)(items.values())
    return changed


def _items(value: Any) -> list[tuple[int | str, object]]:
    if type(value) in (tuple, list):
        return list(enumerate(value))
    if type(value) is dict:
        return [(key, item) for key, item in value.items() if type(key) in (int, str)]
    return []


def describe(value: object, index: Callable[[Tensor], int | None], block: str) -> object:
    """Return the output of ``block`` with an ``At`` in place of each tensor.

    ``index`` gives the tensor's position in the crossing, or None.

    Raises:
        StageError: The output contains an object that can neither be sent nor be rebuilt on the
            other side.
    """

    def described(item: object) -> object:
        if isinstance(item, Tensor):
            return At(index(item))
        if item is None or type(item) in (bool, int, float, str):
            return item
        raise StageError(
            f"block '{block}' returned a {type(item).__name__}, which cannot be rebuilt on the "
            "next pipeline stage. Blocks may return tensors, None, numbers and strings, in plain "
            "tuples, lists and dictionaries with int or str keys. Keep other objects inside the "
            "block (a Hugging Face model: use_cache=False), or use pipeline_parallel_size=1"
        )

    return _mapped(value, described)


def rebuild(
    described: object, tensors: Sequence[Tensor], elsewhere: Callable[[], Tensor] | None = None
) -> Any:
    """Rebuild the output from the result of ``describe``.

    ``elsewhere()`` supplies tensors that did not cross. It is required if there may be any.
    """

    def built(item: object) -> object:
        if not isinstance(item, At):
            return item
        if item.index is not None:
            return tensors[item.index]
        assert elsewhere is not None
        return elsewhere()

    return _mapped(described, built)


def _mapped(value: Any, change: Callable[[object], object]) -> Any:
    """Return a copy of a nest with everything except plain containers changed."""
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, change) for item in value)
    items = _items(value)
    if type(value) is dict and len(items) == len(value):
        return {key: _mapped(item, change) for key, item in items}
    return change(value)
