"""Tensors sent from one pipeline stage to the next, and the gradients that return.

A block may return one tensor or a nest of tuples, lists and dictionaries; whichever of its tensors
the next block is given cross, each
once. Beside them cross *extras*: tensors from before the blocks that blocks are given as further
arguments (the memory of a cross attention, a relative bias), in so far as the next stage cannot
compute them itself::

    x, y = block(x, y, memory=m)        tensors   x            y            m
                                        output    (At(0), At(1))
                                        extras    (("memory",), 2)

and what is *collected* over the blocks of all stages so far, so that the last one has it whole:
what they returned, for the hooks on them and the sums over them, and what a Hugging Face model
captures of its layers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_ptdp.base.errors import PTDPError

__all__ = [
    "At",
    "Crossing",
    "Form",
    "Path",
    "Roots",
    "StageError",
    "StageExit",
    "TensorForm",
    "backward",
    "describe",
    "rebuild",
    "substitute",
    "tensors_in",
]

Path = tuple[int | str, ...]
"""Place of a tensor in a call: an argument's position or keyword, then indices and keys into it."""

Nest = TypeVar("Nest")


class StageError(PTDPError, RuntimeError):
    """The model's forward did something that a pipeline stage cannot honour; the message says what
    and how to mend it."""


class StageExit(BaseException):
    """Leaves the user's step at the end of a stage; a BaseException, so that ``except Exception``
    lets it through."""

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
        alike: Whether all tensor-parallel ranks hold it, and its gradient, alike: true of a hidden
            state. A bias of the attention has the values, or the gradients, of a rank's own heads.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = False
    alike: bool = False

    @classmethod
    def of(cls, tensor: Tensor, *, differentiable: bool = False, alike: bool = False) -> TensorForm:
        """The form of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype, differentiable, alike)

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


@dataclass(frozen=True, slots=True)
class At:
    """In the place of a tensor: which one of a crossing it is; None for one that does not cross."""

    index: int | None


@dataclass(frozen=True, kw_only=True)
class Form:
    """All that both sides must know about a crossing but its values.

    Attributes:
        tensors: In the order in which they are sent.
        output: What the last block of the stage returned, with an ``At`` in place of each tensor.
        extras: Places of further arguments, and which tensor belongs there.
        collected: The same of what was collected over the blocks; None for nothing.
        past: Of each container whose blocks have all run, ``output`` and ``tensors`` of what the
            last one returned.
    """

    tensors: tuple[TensorForm, ...] = ()
    output: object = None
    extras: tuple[tuple[Path, int], ...] = ()
    collected: object = None
    past: tuple[Form, ...] = ()

    def encode(self) -> bytes:
        """For another rank."""
        return pickle.dumps(self)

    @staticmethod
    def decode(data: bytes) -> Form:
        """Return the form that ``encode`` wrote."""
        form: Form = pickle.loads(data)
        return form

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors)) or "no tensors"


@dataclass(frozen=True)
class Crossing:
    """Tensors on their way over a stage boundary: activations with their form, or the gradients of
    a crossing's differentiable ones.

    Attributes:
        tensors: No two of them the same.
        form: What they are; of gradients only ``tensors``.
    """

    tensors: tuple[Tensor, ...]
    form: Form = Form()

    @property
    def awaited(self) -> tuple[TensorForm, ...]:
        """The gradients that come back for it."""
        return tuple(form for form in self.form.tensors if form.differentiable)

    def entering(self, *, training: bool = True) -> Crossing:
        """Return the crossing on which the next stage works: the same values, detached from the
        graph.

        In training the differentiable ones are leaves that collect gradients.
        """
        pairs = zip(self.tensors, self.form.tensors, strict=True)
        tensors = (
            t.detach().requires_grad_() if training and form.differentiable else t.detach()
            for t, form in pairs
        )
        return Crossing(tuple(tensors), self.form)

    def writable(self) -> Crossing:
        """Return aliases of the tensors that entered, into which a block may write, as it may not
        into leaves of the graph."""
        tensors = (
            _Alias.apply(tensor) if tensor.requires_grad else tensor for tensor in self.tensors
        )
        return Crossing(tuple(tensors), self.form)

    def roots(self) -> Roots:
        """Return the starting points of the backward, one for each awaited gradient; None if
        nothing here needs it.

        Keeps no activation alive.
        """
        pairs = zip(self.tensors, self.form.tensors, strict=True)
        return tuple(
            get_gradient_edge(tensor) if tensor.requires_grad else None
            for tensor, form in pairs
            if form.differentiable
        )

    def gradients(self) -> Crossing:
        """After the backward of the stage that it entered: a gradient for each differentiable
        tensor, zeros where none came."""
        pairs = zip(self.tensors, self.form.tensors, strict=True)
        entered = [tensor for tensor, form in pairs if form.differentiable]
        tensors = (
            tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            for tensor in entered
        )
        return Crossing(tuple(tensors), Form(tensors=self.awaited))


class _Alias(torch.autograd.Function):
    """The same memory, behind a leaf."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


Roots = tuple[Tensor | GradientEdge | None, ...]
"""Starting points of a stage's backward."""


def backward(roots: Roots, gradients: Crossing | None) -> None:
    """The backward of one stage: from its roots with the gradients that came back, or (None) from a
    scalar loss."""
    incoming = (None,) * len(roots) if gradients is None else gradients.tensors
    pairs = [
        (root, gradient) for root, gradient in zip(roots, incoming, strict=True) if root is not None
    ]
    starts: Any = [root for root, _ in pairs]
    if starts:
        torch.autograd.backward(starts, [gradient for _, gradient in pairs])


# ---- nests of tuples, lists and dictionaries -----------------------------------------------------


def tensors_in(value: object, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors of a nest with their places; other objects are not looked into."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, item in _items(value):
        yield from tensors_in(item, (*path, key))


def substitute(value: Nest, change: Callable[[Path, Tensor], Tensor], path: Path = ()) -> Nest:
    """``value`` with its tensors changed; the very same object where nothing is."""
    changed: Any = value
    new = [(key, item, substitute(item, change, (*path, key))) for key, item in _items(value)]
    if isinstance(value, Tensor):
        changed = change(path, value)
    elif any(item is not other for _, item, other in new):
        items = {key: other for key, _, other in new}
        changed = {**value, **items} if isinstance(value, dict) else type(changed)(items.values())
    return changed


def _items(value: object) -> list[tuple[int | str, object]]:
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return list(enumerate(value))
    if isinstance(value, dict) and type(value) is dict:
        return [(key, item) for key, item in value.items() if type(key) in (int, str)]
    return []


def describe(value: object, index: Callable[[Tensor], int | None], block: str) -> object:
    """Return the output of ``block`` with an ``At`` in place of each tensor; ``index`` gives the
    tensor's position in the crossing, or None.

    Raises:
        StageError: Something in it can neither be sent nor be built again on the other side.
    """

    def described(item: object) -> object:
        if isinstance(item, Tensor):
            return At(index(item))
        if item is None or type(item) in (bool, int, float, str):
            return item
        raise StageError(
            f"block '{block}' returned a {type(item).__name__}, which cannot be built again on "
            "the next pipeline stage. What blocks return "
            "may be tensors, None, numbers and strings, in plain tuples, lists and dictionaries "
            "with int or str keys; keep other objects "
            "inside the block (a Hugging Face model: use_cache=False), or use "
            "pipeline_parallel_size=1"
        )

    return _mapped(value, described)


def rebuild(
    described: object, tensors: Sequence[Tensor], elsewhere: Callable[[], Tensor] | None = None
) -> Any:
    """Rebuild the output that ``describe`` described, with ``elsewhere()`` for tensors that did not
    cross, if there may be any."""

    def built(item: object) -> object:
        if not isinstance(item, At):
            return item
        if item.index is not None:
            return tensors[item.index]
        assert elsewhere is not None
        return elsewhere()

    return _mapped(described, built)


def _mapped(value: object, change: Callable[[object], object]) -> object:
    """A new nest with all that is no plain container changed."""
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(_mapped(item, change) for item in value)
    if (
        isinstance(value, dict)
        and type(value) is dict
        and all(type(key) in (int, str) for key in value)
    ):
        return {key: _mapped(item, change) for key, item in value.items()}
    return change(value)
