"""What goes from one pipeline stage to the next, and the gradients that come back.

A block may return one tensor or a nest of tuples, lists and dictionaries; whichever of its tensors the next block is given cross, each
once. Beside them cross *extras*: tensors from before the blocks that blocks are given as further arguments (the memory of a cross
attention, a relative bias), in so far as the next stage cannot compute them itself::

    x, y = block(x, y, memory=m)        tensors   x            y            m
                                        output    ("tuple", (("tensor", 0), ("tensor", 1)))
                                        extras    (("memory",), 2)

and what is *collected* over the blocks of all stages so far, so that the last one has it whole: what they returned, for the hooks on them
and the sums over them, and what a Hugging Face model captures of its layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = [
    "Crossing",
    "Form",
    "Path",
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
"""Where a tensor stands in a call: an argument's position or keyword, then indices and keys into it."""

Structure = tuple[Any, ...]
"""``("tensor", index)``, ``("elsewhere",)`` for a tensor that does not cross, ``("value", constant)``, ``("tuple" | "list", items)`` or
``("dict", ((key, item), ...))``."""


class StageError(RuntimeError):
    """The model's forward did something that a pipeline stage cannot honour; the message says what and how to mend it."""


class StageExit(BaseException):
    """Leaves the user's step at the end of a stage; a BaseException, so that ``except Exception`` lets it through."""

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
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = False

    @classmethod
    def of(cls, tensor: Tensor, *, differentiable: bool = False) -> TensorForm:
        """The form of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype, differentiable)

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


@dataclass(frozen=True, kw_only=True)
class Form:
    """All that both sides must know about a crossing but its values.

    Attributes:
        tensors: In the order in which they are sent.
        output: Structure of what the last block of the stage returned.
        extras: Places of further arguments, and which tensor belongs there.
        collected: Structure of what was collected over the blocks: ("value", None) for nothing.
        past: Of each container whose blocks have all run, the structure and the tensors of what the last one returned.
    """

    tensors: tuple[TensorForm, ...] = ()
    output: Structure = ("value", None)
    extras: tuple[tuple[Path, int], ...] = ()
    collected: Structure = ("value", None)
    past: tuple[Form, ...] = ()

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(self._as_json()).encode()

    def _as_json(self) -> dict[str, Any]:
        tensors = [(form.shape, str(form.dtype).removeprefix("torch."), form.differentiable) for form in self.tensors]
        rest = {"output": self.output, "extras": self.extras, "collected": self.collected}
        return {"tensors": tensors, "past": [form._as_json() for form in self.past], **rest}

    @classmethod
    def decode(cls, data: bytes) -> Form:
        """What ``encode`` wrote."""
        return cls._from_json(json.loads(data))

    @classmethod
    def _from_json(cls, found: dict[str, Any]) -> Form:
        tensors = tuple(TensorForm(tuple(shape), getattr(torch, dtype), flag) for shape, dtype, flag in found["tensors"])
        past = tuple(cls._from_json(form) for form in found["past"])
        rest = {key: _as_tuples(found[key]) for key in ("output", "extras", "collected")}
        return cls(tensors=tensors, past=past, **rest)

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors)) or "no tensors"


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Crossing:
    """Tensors on their way over a stage boundary: activations with their form, or the gradients of a crossing's differentiable ones.

    Attributes:
        tensors: No two of them the same.
        form: What they are; empty for gradients, whose form follows from what was sent.
    """

    tensors: tuple[Tensor, ...]
    form: Form = Form()

    @classmethod
    def of(cls, output: Any) -> Crossing:
        """A crossing of ``output`` whole, its tensors differentiable where they require a gradient."""
        tensors = tuple({id(tensor): tensor for _, tensor in tensors_in(output)}.values())
        index = {id(tensor): i for i, tensor in enumerate(tensors)}
        forms = tuple(TensorForm.of(tensor, differentiable=tensor.requires_grad) for tensor in tensors)
        return cls(tensors, Form(tensors=forms, output=describe(output, lambda tensor: index[id(tensor)], "?")))

    @property
    def awaited(self) -> tuple[TensorForm, ...]:
        """The gradients that come back for it."""
        return tuple(form for form in self.form.tensors if form.differentiable)

    def entering(self, *, training: bool = True) -> Crossing:
        """What the next stage works on: the same values, cut off from the graph; when training the differentiable ones are leaves
        that collect gradients."""
        pairs = zip(self.tensors, self.form.tensors, strict=True)
        tensors = (t.detach().requires_grad_() if training and form.differentiable else t.detach() for t, form in pairs)
        return Crossing(tuple(tensors), self.form)

    def roots(self) -> tuple[GradientEdge | None, ...]:
        """Where the backward starts, for each awaited gradient; None where nothing here needs it. Keeps no activation alive."""
        pairs = zip(self.tensors, self.form.tensors, strict=True)
        return tuple(get_gradient_edge(tensor) if tensor.requires_grad else None for tensor, form in pairs if form.differentiable)

    def gradients(self) -> Crossing:
        """After the backward of the stage that it entered: a gradient for each differentiable tensor, zeros where none came."""
        pairs = zip(self.tensors, self.form.tensors, strict=True)
        entered = [tensor for tensor, form in pairs if form.differentiable]
        return Crossing(tuple(tensor.grad if tensor.grad is not None else torch.zeros_like(tensor) for tensor in entered))


def backward(roots: Sequence[Tensor | GradientEdge | None], gradients: Crossing | None) -> None:
    """The backward of one stage: from its roots with the gradients that came back, or (None) from a scalar loss."""
    incoming: Sequence[Tensor | None] = [None] * len(roots) if gradients is None else gradients.tensors
    pairs = [(root, gradient) for root, gradient in zip(roots, incoming, strict=True) if root is not None]
    starts: Any = [root for root, _ in pairs]
    if starts:
        torch.autograd.backward(starts, [gradient for _, gradient in pairs])


# ---- nests of tuples, lists and dictionaries --------------------------------------------------------------------------


def tensors_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors of a nest with their places; other objects are not looked into."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, item in _items(value):
        yield from tensors_in(item, (*path, key))


def substitute(value: Any, change: Callable[[Path, Tensor], Tensor], path: Path = ()) -> Any:
    """``value`` with its tensors changed; the very same object where nothing is."""
    if isinstance(value, Tensor):
        return change(path, value)
    new = [(key, item, substitute(item, change, (*path, key))) for key, item in _items(value)]
    if all(item is changed for _, item, changed in new):
        return value
    if isinstance(value, dict):
        return {**value, **{key: changed for key, _, changed in new}}
    return type(value)(changed for _, _, changed in new)


def _items(value: Any) -> list[tuple[int | str, Any]]:
    if type(value) in (tuple, list):
        return list(enumerate(value))
    if type(value) is dict:
        return [(key, item) for key, item in value.items() if type(key) in (int, str)]
    return []


def describe(value: Any, index: Callable[[Tensor], int | None], block: str) -> Structure:
    """The structure of what ``block`` returned; ``index`` tells which tensor of the crossing a tensor is, or None.

    Raises:
        StageError: Something in it can neither be sent nor be built again on the other side.
    """
    if isinstance(value, Tensor):
        found = index(value)
        return ("elsewhere",) if found is None else ("tensor", found)
    if value is None or type(value) in (bool, int, float, str):
        return ("value", value)
    if type(value) in (tuple, list):
        return (type(value).__name__, tuple(describe(item, index, block) for item in value))
    if type(value) is dict and all(type(key) in (int, str) for key in value):
        return ("dict", tuple((key, describe(item, index, block)) for key, item in value.items()))
    raise StageError(
        f"block '{block}' returned a {type(value).__name__}, which cannot be built again on the next pipeline stage. What blocks return "
        "may be tensors, None, numbers and strings, in plain tuples, lists and dictionaries with int or str keys; keep other objects "
        "inside the block (a Hugging Face model: use_cache=False), or use pipeline_parallel_size=1"
    )


def rebuild(structure: Structure, tensors: Sequence[Tensor], elsewhere: Callable[[], Tensor]) -> Any:
    """What ``describe`` described, with ``elsewhere()`` for the tensors that did not cross."""
    match structure:
        case ("tensor", int(index)):
            return tensors[index]
        case ("elsewhere",):
            return elsewhere()
        case ("value", value):
            return value
        case ("tuple", items):
            return tuple(rebuild(item, tensors, elsewhere) for item in items)
        case ("list", items):
            return [rebuild(item, tensors, elsewhere) for item in items]
        case ("dict", items):
            return {key: rebuild(item, tensors, elsewhere) for key, item in items}
    raise AssertionError(f"unknown structure {structure}")
