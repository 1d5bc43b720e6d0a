"""How one run of a stage is entered and left: what blocks are given and return, and what of it has to cross."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp._transformers import captured_outputs
from lightning_ptdp.pipeline.crossing import (
    Crossing,
    Form,
    Path,
    StageError,
    TensorForm,
    describe,
    rebuild,
    substitute,
    tensors_in,
)
from lightning_ptdp.pipeline.foreign import Foreign, Origin, plain, put_instead, replacement

__all__ = ["Boundary"]

_LOST = (
    "something is computed between the repeated blocks or behind them (a sum around a block, a loss, a log) from what modules of the first "
    "pipeline stage computed before them. Only what blocks are given and return crosses to the later stages: move it into the "
    "blocks, compute it anew behind them, or use pipeline_parallel_size=1"
)
_NOT_PASSED = (
    "a tensor that a block on an earlier pipeline stage returned is used, but the model does not pass it on to the next block, so it "
    "does not cross. Where the model collects over its blocks what they return (all hidden states, losses of routers, attention "
    "weights), let all of it cross with ParallelPlan(collects=True), carry a sum through the blocks (x, total = block(x, total)), or use "
    "pipeline_parallel_size=1"
)


@dataclass(eq=False)
class Boundary:
    """What the placeholders and hooks of a rank share while a stage runs.

    Attributes:
        collects: Whether all that blocks return crosses to all later stages.
        stage: The running stage; None between runs.
        training: Whether gradients flow.
        received: What entered from the stage before.
        passes: How often the first placeholder block was called.
    """

    collects: bool = False
    stage: int | None = None
    training: bool = False
    received: Crossing | None = None
    passes: int = 0
    _origin: Origin = field(default_factory=Origin)
    _unsent: Origin = field(default_factory=Origin)
    _entrance: str = ""
    _outputs: dict[str, Any] = field(default_factory=dict)
    _seen: list[Any] = field(default_factory=list)
    _captured: dict[str, list[Any]] = field(default_factory=dict)
    _output: Any = None
    _reached: bool = False
    _given: dict[Path, list[Tensor]] = field(default_factory=dict)
    _usual: dict[TensorForm, Form] = field(default_factory=dict)

    def begin(self, stage: int, received: Crossing | None, *, training: bool, entrance: str = "") -> None:
        """Start a run of ``stage``, for which block ``entrance``, the last one of the stages before, returns what was received."""
        self._entrance = entrance
        self.stage, self.received, self.training = stage, received, training
        self.passes, self._reached = 0, False
        self._origin = Origin(why=_LOST if stage else None)
        self._unsent = Origin(why=_NOT_PASSED)
        self._output = None if received is None else self._received_output(received)
        collected = None if received is None else rebuild(received.form.collected, received.tensors, _none_elsewhere)
        self._outputs, self._seen, self._captured = collected if collected is not None else ({}, [], {})

    def end(self) -> None:
        """End the run; nothing is held on to."""
        for origin in (self._origin, self._unsent):
            origin.over = True
            origin.written.clear()
        self.stage = self.received = self._output = None
        self._outputs, self._seen, self._captured = {}, [], {}
        self._given.clear()

    # ---- in front of the blocks ---------------------------------------------------------------------------------------

    def mark(self, tensor: Tensor) -> Tensor:
        """Mark what a module of the first stage (or its stub) returned, if a stage runs."""
        return tensor if self.stage is None else Foreign.mark(tensor, self._origin)

    # ---- blocks -------------------------------------------------------------------------------------------------------

    def earlier_output(self, name: str) -> Any:
        """What block ``name`` of an earlier stage returned; of all but the last one, only what is collected has crossed."""
        assert self.received is not None
        self._origin.behind = True
        if name != self._entrance:
            return self._outputs[name] if name in self._outputs else substitute(self._output, self._unknown)
        self._unsent.behind = True
        for kind, values in captured_outputs().items():
            values[:] = self._captured.get(kind, [])
        self._output = self._outputs[name] if name in self._outputs else self._received_output(self.received)
        return self._output

    def seen_by_hooks(self, block: str) -> Iterator[tuple[str, int, Any]]:
        """What hooks of ``block`` and the modules inside were given on its stage: the module's name, the hook's position, the output."""
        yield from ((name, position, output) for name, position, output in self._seen if f"{name}.".startswith(f"{block}."))

    def returned(self, name: str, output: Any) -> None:
        """Block ``name`` of this stage has returned ``output``."""
        if self.stage is not None:
            self._output = output
            if self.collects:
                self._outputs[name] = output

    def see(self, name: str, position: int, output: Any) -> None:
        """A hook of module ``name`` of this stage was given ``output``."""
        if self.stage is not None:
            self._seen.append([name, position, output])

    def arguments(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What block ``name`` of this stage is to be given instead of ``args`` and ``kwargs``.

        Raises:
            StageError: It would be given something that this stage cannot know.
        """
        if self.stage is None:  # a recomputation in the backward
            return substitute(args, _recalled), substitute(kwargs, _recalled)
        if self._reached and not kwargs and len(args) == 1 and args[0] is self._output:
            return args, kwargs  # the usual case, without a closer look
        own = self._returned_ids()

        def change(path: Path, tensor: Tensor) -> Tensor:
            return tensor if id(tensor) in own else self._argument(name, path, tensor)

        args, kwargs = substitute(args, change), substitute(kwargs, change)
        if not self._reached:
            self._reached = True
            self._check_entrance(name, {id(tensor) for _, tensor in _call(args, kwargs)})
        return args, kwargs

    def leave(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Crossing:
        """What crosses when block ``name``, the first one of the next stage, is called.

        Raises:
            StageError: It is given something else than what blocks returned and what was there before them.
        """
        if not self._reached and self.received is None:
            raise StageError(f"block '{name}' was called before any block of the first pipeline stage")
        parts = (self._outputs, self._seen, captured_outputs())
        collected = parts if any(parts) else None
        if collected is None and self._is_usual(args, kwargs):
            return Crossing(args, self._usual_form(args[0]))
        own = self._returned_ids()
        passed: dict[Path, int] = {}
        extras = dict(self._known_extras())
        for path, tensor in _call(args, kwargs):
            if id(tensor) in own:
                passed[path] = id(tensor)
            elif self._is_extra(name, path, tensor):
                extras[path] = tensor
        if not passed:
            raise _computed_between(name)
        extras = {path: tensor for path, tensor in extras.items() if path not in passed}
        crossing = {id(tensor): tensor for _, tensor in tensors_in(self._output) if id(tensor) in passed.values()}
        crossing.update((id(tensor), tensor) for tensor in extras.values())
        handed_on = frozenset(crossing)
        crossing.update((id(tensor), tensor) for _, tensor in tensors_in(collected))
        index = {key: i for i, key in enumerate(crossing)}
        tensors = tuple(plain(tensor) for tensor in crossing.values())
        form = Form(
            tensors=tuple(TensorForm.of(tensor, differentiable=self._needs_gradient(tensor)) for tensor in tensors),
            output=describe(self._output, lambda tensor: index[id(tensor)] if id(tensor) in handed_on else None, name),
            extras=tuple((path, index[id(tensor)]) for path, tensor in extras.items()),
            collected=describe(collected, lambda tensor: index[id(tensor)], name),
        )
        return Crossing(tensors, form)

    def _is_usual(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether nothing crosses but the one plain tensor that the last block returned."""
        if kwargs or len(args) != 1 or args[0] is not self._output or type(args[0]) is not Tensor:
            return False
        return not (self._given if self.received is None else self.received.form.extras)

    def _usual_form(self, tensor: Tensor) -> Form:
        """Made once for each shape, since the ranks behind wait for it to be sent."""
        crosses = TensorForm.of(tensor, differentiable=self._needs_gradient(tensor))
        if crosses not in self._usual:
            self._usual[crosses] = Form(tensors=(crosses,), output=("tensor", 0))
        return self._usual[crosses]

    # ---- one argument -------------------------------------------------------------------------------------------------

    def _argument(self, name: str, path: Path, tensor: Tensor) -> Tensor:
        """What a local block is given where the model gives ``tensor``, which no block returned."""
        if self.received is None:
            if self._is_foreign(tensor) or self._needs_gradient(tensor):
                self._given.setdefault(path, []).append(tensor)
            return plain(tensor)
        known = replacement(tensor)
        if known is not None and self._entered(known):
            return known
        extra = next((self.received.tensors[i] for place, i in self.received.form.extras if place == path), None)
        if extra is None:
            if self._is_foreign(tensor):
                raise StageError(
                    f"block '{name}' is given a tensor ({_place(path)}) that was computed before the repeated blocks, but no "
                    "block up to the first one of the second pipeline stage is given it there, so it does not cross. Give it to every "
                    "block, or use pipeline_parallel_size=1"
                )
            return tensor
        if not (self._is_foreign(tensor) or self._needs_gradient(tensor)):
            return tensor
        if self._given.setdefault(path, [tensor])[0] is not tensor:
            raise StageError(
                f"block '{name}' is given another tensor ({_place(path)}) than the block before it, computed outside the blocks; what "
                "crosses a pipeline boundary beside the blocks' own results must be one tensor for all of them. Compute it inside the "
                "blocks, or use pipeline_parallel_size=1"
            )
        put_instead(tensor, extra)
        return extra

    def _known_extras(self) -> Iterator[tuple[Path, Tensor]]:
        """Extras that later stages may need, whether or not the next block is given them."""
        if self.received is not None:
            yield from ((path, self.received.tensors[index]) for path, index in self.received.form.extras)
            return
        for path, (first, *others) in self._given.items():
            if self._is_foreign(first) and all(other is first for other in others):
                yield path, first

    def _is_extra(self, name: str, path: Path, tensor: Tensor) -> bool:
        """Whether the next stage must be given ``tensor``, which no block returned."""
        if self.received is not None:
            found = self._argument(name, path, tensor)
            if found is tensor and self._needs_gradient(tensor) and not self._entered(tensor):
                raise _computed_between(name)
            return False
        if self._is_foreign(tensor):
            return True
        if not self._needs_gradient(tensor):
            return False
        if not any(tensor is given for all_given in self._given.values() for given in all_given):
            raise _computed_between(name)
        return True

    def _is_foreign(self, tensor: Tensor) -> bool:
        return isinstance(tensor, Foreign) or self._origin.has_written(tensor)

    def _needs_gradient(self, tensor: Tensor) -> bool:
        """Every stage has its own of a parameter itself, if it is handed around."""
        return self.training and tensor.requires_grad and not isinstance(tensor, nn.Parameter)

    def _received_output(self, received: Crossing) -> Any:
        return rebuild(received.form.output, received.tensors, self.unknown)

    def unknown(self) -> Tensor:
        """What may be passed around, but not used."""
        return Foreign.mark(torch.empty(0), self._unsent)

    def _unknown(self, _path: Path, tensor: Tensor) -> Tensor:
        return Foreign.mark(tensor.detach(), self._unsent)

    def _entered(self, tensor: Tensor) -> bool:
        return self.received is not None and any(tensor is received for received in self.received.tensors)

    def _returned_ids(self) -> set[int]:
        return {id(tensor) for _, tensor in tensors_in(self._output)}

    def _check_entrance(self, name: str, given: set[int]) -> None:
        """The first block that is called on a stage must be given the very tensors that were received.

        If not, the model computes something between its blocks, which would be computed once more behind the boundary.
        """
        if self.received is None:
            return
        tensors = tensors_in(self._received_output(self.received))
        if any(self._entered(tensor) and id(tensor) not in given for _, tensor in tensors):
            raise _computed_between(name)


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Path, Tensor]]:
    yield from tensors_in(args)
    yield from tensors_in(kwargs)


def _none_elsewhere() -> Tensor:
    raise AssertionError("all that is collected crosses")


def _recalled(_path: Path, tensor: Tensor) -> Tensor:
    """What a recomputed block was given in place of ``tensor``."""
    known = replacement(tensor)
    return plain(tensor) if known is None else known


def _place(path: Path) -> str:
    return f"argument {path[0]}" if isinstance(path[0], int) else f"'{path[0]}'"


def _computed_between(name: str) -> StageError:
    return StageError(
        f"something is computed between the repeated blocks, before block '{name}': its input is not what the block before it "
        "returned. At a pipeline boundary that would be computed twice; move it into the blocks"
    )
