"""How one run of a stage is entered and left: what blocks are given and return, and what of it has to cross."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp._transformers import captured_outputs
from lightning_ptdp.pipeline.containers import Layer, Place
from lightning_ptdp.pipeline.crossing import (
    Crossing,
    Form,
    Path,
    StageError,
    StageExit,
    TensorForm,
    describe,
    rebuild,
    substitute,
    tensors_in,
)
from lightning_ptdp.pipeline.foreign import Foreign, Origin, plain, put_instead, replacement
from lightning_ptdp.pipeline.refusals import LOST, NOT_PASSED, changed_argument, computed_between, lost_argument, unsent_argument

__all__ = ["Boundary"]


@dataclass(eq=False)
class Boundary:
    """What the placeholders and hooks of a rank share while a stage runs.

    Attributes:
        places: Where each stage stands among the containers.
        collects: Whether all that blocks return crosses to all later stages.
        stage: The running stage; None between runs.
        training: Whether gradients flow.
        received: What entered from the stage before.
        passes: How often the placeholder of each container's first block was called.
    """

    places: Sequence[Place]
    collects: bool = False
    stage: int | None = None
    training: bool = False
    received: Crossing | None = None
    passes: Counter[int] = field(default_factory=Counter)
    _lost: Origin = field(default_factory=Origin)
    _true: Origin = field(default_factory=Origin)
    _unsent: Origin = field(default_factory=Origin)
    _container: int = 0
    _begun: bool = True  # the running container began on this stage, not on an earlier one
    _past: tuple[Form, ...] = ()
    _outputs: dict[str, Any] = field(default_factory=dict)
    _seen: list[Any] = field(default_factory=list)
    _captured: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    _output: Any = None
    _reached: bool = False
    _given: dict[Path, list[Tensor]] = field(default_factory=dict)
    _usual: dict[TensorForm, Form] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        """Where the running stage stands."""
        assert self.stage is not None
        return self.places[self.stage]

    def begin(self, stage: int, received: Crossing | None, *, training: bool) -> None:
        """Start a run of ``stage``."""
        self.stage, self.received, self.training = stage, received, training
        self.passes.clear()
        self._lost, self._true, self._unsent = Origin(why=LOST), Origin(), Origin(why=NOT_PASSED)
        self._begin_container(self.place.container)
        self._past = ()
        collected = None
        if received is not None:
            past = () if self.place.inside else (Form(tensors=received.form.tensors, output=received.form.output),)
            self._past = (*received.form.past, *past)
            collected = rebuild(received.form.collected, received.tensors, _none_elsewhere)
            self._begun = not self.place.inside
            self._output = self._received_output(received) if self.place.inside else None
        self._outputs, self._seen, self._captured = collected if collected is not None else ({}, [], {})

    def _begin_container(self, container: int) -> None:
        self._container, self._begun, self._reached, self._output = container, True, False, None
        self._given.clear()

    def end(self) -> None:
        """End the run; nothing is held on to."""
        for origin in (self._lost, self._true, self._unsent):
            origin.over = True
            origin.written.clear()
        self.stage = self.received = self._output = None
        self._outputs, self._seen, self._captured = {}, [], {}
        self._given.clear()

    # ---- in front of the blocks ---------------------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether the blocks whose output was received have been called."""
        return self.stage is not None and self.passes[self.place.received] > 0

    def mark(self, tensor: Tensor, *, true: bool) -> Tensor:
        """Mark what a module before the blocks (or its stub: ``true=False``) returned, if a stage runs."""
        return tensor if self.stage is None else Foreign.mark(tensor, self._true if true else self._lost)

    # ---- blocks -------------------------------------------------------------------------------------------------------

    def earlier_output(self, layer: Layer) -> Any:
        """What ``layer``, a block of an earlier stage, returned; of all but the last one, only what is collected has crossed."""
        assert self.received is not None
        is_received, is_entrance = layer.container == self.place.received, layer.name == self.place.entrance
        if layer.is_last or is_entrance:
            for kind, values in captured_outputs().items():
                values[:] = self._captured.get(layer.container, {}).get(kind, [])
        self._lost.behind = self._lost.behind or is_received
        self._unsent.behind = self._unsent.behind or is_entrance
        output = self._outputs.get(layer.name)
        if output is None and is_received:
            output = self._received_output(self.received)
            output = output if is_entrance else substitute(output, self._unknown)
        elif output is None:
            form, device = self._past[layer.container], next((tensor.device for tensor in self.received.tensors), None)
            zeros = [torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) for tensor in form.tensors]
            output = self._marked(rebuild(form.output, zeros, self.unknown), self._lost)
        if is_entrance and self.place.inside:
            self._output = output
        return self._marked(output, self._true) if is_entrance and not self.place.inside else output

    def seen_by_hooks(self, block: str) -> Iterator[tuple[str, int, Any]]:
        """What hooks of ``block`` and the modules inside were given on its stage: the module's name, the hook's position, the output."""
        yield from ((name, position, output) for name, position, output in self._seen if f"{name}.".startswith(f"{block}."))

    def returned(self, layer: Layer, output: Any, *, followed: bool, leaves: bool) -> Any:
        """What is handed on when ``layer``, a block of this stage, has returned ``output``.

        Args:
            layer: The block.
            output: What it returned.
            followed: Whether the next block is in another container.
            leaves: Whether that block is on the next stage.

        Raises:
            StageExit: The stage ends here.
        """
        if self.stage is None:
            return output
        self._output = output
        if self.collects:
            self._outputs[layer.name] = output
        if not followed:
            return output
        own = {id(tensor): tensor for _, tensor in tensors_in(output)}
        if leaves:
            raise StageExit(self._crossing(layer.name, own, {}, collected=self._collected()))
        if captured_outputs():
            self._captured[layer.container] = {kind: list(values) for kind, values in captured_outputs().items()}
        crossing = self._crossing(layer.name, own, {})
        self._past = (*self._past, Form(tensors=crossing.form.tensors, output=crossing.form.output))
        return self._marked(output, self._true)

    def _marked(self, output: Any, origin: Origin) -> Any:
        return substitute(output, lambda _path, tensor: Foreign.mark(tensor, origin))

    def see(self, name: str, position: int, output: Any) -> None:
        """A hook of module ``name`` of this stage was given ``output``."""
        if self.stage is not None:
            self._seen.append([name, position, output])

    def arguments(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What ``layer``, a block of this stage, is to be given instead of ``args`` and ``kwargs``.

        Raises:
            StageError: It would be given something that this stage cannot know.
        """
        if self.stage is None:  # a recomputation in the backward
            return substitute(args, _recalled), substitute(kwargs, _recalled)
        if layer.container != self._container:
            self._begin_container(layer.container)
        if self._reached and not kwargs and len(args) == 1 and args[0] is self._output:
            return args, kwargs  # the usual case, without a closer look
        own = self._returned_ids()

        def change(path: Path, tensor: Tensor) -> Tensor:
            return tensor if id(tensor) in own else self._argument(layer.name, path, tensor)

        args, kwargs = substitute(args, change), substitute(kwargs, change)
        if not self._reached:
            self._reached = True
            self._check_entrance(layer.name, {id(tensor) for _, tensor in _call(args, kwargs)})
        return args, kwargs

    def leave(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Crossing:
        """What crosses when ``layer``, the first block of the next stage, is called.

        Raises:
            StageError: It is given something else than what blocks returned and what was there before them.
        """
        name = layer.name
        if layer.container != self._container or (self._begun and not self._reached):
            raise StageError(
                f"block '{name}' was called before any block of the first pipeline stage"
                if self.received is None
                else f"block '{name}' was called before the blocks in front of it, which are on pipeline stage {self.stage}"
            )
        collected = self._collected()
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
            raise computed_between(name)
        extras = {path: tensor for path, tensor in extras.items() if path not in passed}
        output = {id(tensor): tensor for _, tensor in tensors_in(self._output) if id(tensor) in passed.values()}
        return self._crossing(name, output, extras, collected=collected)

    def _collected(self) -> Any:
        """All that is collected over the blocks up to here; None if nothing is."""
        captured = {**self._captured, self._container: captured_outputs()} if captured_outputs() else self._captured
        parts = (self._outputs, self._seen, captured)
        return parts if any(parts) else None

    def _crossing(self, name: str, output: dict[int, Tensor], extras: dict[Path, Tensor], *, collected: Any = None) -> Crossing:
        crossing = {**output, **{id(tensor): tensor for tensor in extras.values()}}
        handed_on = frozenset(crossing)
        crossing.update((id(tensor), tensor) for _, tensor in tensors_in(collected))
        index = {key: i for i, key in enumerate(crossing)}
        tensors = tuple(plain(tensor) for tensor in crossing.values())
        form = Form(
            tensors=tuple(TensorForm.of(tensor, differentiable=self._needs_gradient(tensor)) for tensor in tensors),
            output=describe(self._output, lambda tensor: index[id(tensor)] if id(tensor) in handed_on else None, name),
            extras=tuple((path, index[id(tensor)]) for path, tensor in extras.items()),
            collected=describe(collected, lambda tensor: index[id(tensor)], name),
            past=self._past,
        )
        return Crossing(tensors, form)

    def _is_usual(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether nothing crosses but the one plain tensor that the last block returned."""
        if kwargs or len(args) != 1 or args[0] is not self._output or type(args[0]) is not Tensor or self._past:
            return False
        return not (self._given if self._begun or self.received is None else self.received.form.extras)

    def _usual_form(self, tensor: Tensor) -> Form:
        """Made once for each shape, since the ranks behind wait for it to be sent."""
        crosses = TensorForm.of(tensor, differentiable=self._needs_gradient(tensor))
        if crosses not in self._usual:
            self._usual[crosses] = Form(tensors=(crosses,), output=("tensor", 0))
        return self._usual[crosses]

    # ---- one argument -------------------------------------------------------------------------------------------------

    def _argument(self, name: str, path: Path, tensor: Tensor) -> Tensor:
        """What a local block is given where the model gives ``tensor``, which no block returned."""
        if self._begun or self.received is None:
            if self._is_lost(tensor):
                raise lost_argument(name, path, "between" if self._container else "before")
            if self._is_foreign(tensor) or self._needs_gradient(tensor):
                self._given.setdefault(path, []).append(tensor)
            return plain(tensor)
        known = replacement(tensor)
        if known is not None and self._entered(known):
            return known
        extra = next((self.received.tensors[i] for place, i in self.received.form.extras if place == path), None)
        if extra is None:
            if self._is_foreign(tensor):
                raise unsent_argument(name, path)
            return tensor
        if not (self._is_foreign(tensor) or self._needs_gradient(tensor)):
            return tensor
        if self._given.setdefault(path, [tensor])[0] is not tensor:
            raise changed_argument(name, path)
        put_instead(tensor, extra)
        return extra

    def _known_extras(self) -> Iterator[tuple[Path, Tensor]]:
        """Extras that later stages may need, whether or not the next block is given them."""
        if not self._begun and self.received is not None:
            yield from ((path, self.received.tensors[index]) for path, index in self.received.form.extras)
            return
        for path, (first, *others) in self._given.items():
            if self._is_foreign(first) and all(other is first for other in others):
                yield path, first

    def _is_extra(self, name: str, path: Path, tensor: Tensor) -> bool:
        """Whether the next stage must be given ``tensor``, which no block returned."""
        if not self._begun:
            found = self._argument(name, path, tensor)
            if found is tensor and self._needs_gradient(tensor) and not self._entered(tensor):
                raise computed_between(name)
            return False
        if self._is_lost(tensor):
            return False  # where it is needed, it is refused
        if self._is_foreign(tensor):
            return True
        if not self._needs_gradient(tensor):
            return False
        if not any(tensor is given for all_given in self._given.values() for given in all_given):
            raise computed_between(name)
        return True

    def _is_foreign(self, tensor: Tensor) -> bool:
        return isinstance(tensor, Foreign) or self._lost.has_written(tensor) or self._true.has_written(tensor)

    def _is_lost(self, tensor: Tensor) -> bool:
        return self._lost.has_written(tensor) or (isinstance(tensor, Foreign) and tensor.origin.why is not None)

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
        if self._begun or self.received is None:
            return
        tensors = tensors_in(self._received_output(self.received))
        if any(self._entered(tensor) and id(tensor) not in given for _, tensor in tensors):
            raise computed_between(name)


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Path, Tensor]]:
    yield from tensors_in(args)
    yield from tensors_in(kwargs)


def _none_elsewhere() -> Tensor:
    raise AssertionError("all that is collected crosses")


def _recalled(_path: Path, tensor: Tensor) -> Tensor:
    """What a recomputed block was given in place of ``tensor``."""
    known = replacement(tensor)
    return plain(tensor) if known is None else known
