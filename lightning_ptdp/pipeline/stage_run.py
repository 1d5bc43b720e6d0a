"""State of one run of a stage, and its checks of tensors that cross the boundary."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.pipeline.containers import BlockPlace, Layer
from lightning_ptdp.pipeline.crossing import (
    Crossing,
    Form,
    Path,
    StageError,
    rebuild,
    substitute,
    tensors_in,
)
from lightning_ptdp.pipeline.first_stage_values import (
    FirstStageValue,
    Origin,
    plain,
    put_instead,
    replacement,
)
from lightning_ptdp.shims.torch import output_before_hooks
from lightning_ptdp.shims.transformers import captured_outputs


@dataclass(eq=False)
class StageRun:
    """One run of a stage.

    Attributes:
        stage: The stage.
        place: Its position among the containers.
        training: Whether gradients flow.
        received: The crossing received from the stage before.
        passes: Number of calls of the placeholder of each container's first block.
        container: The container whose blocks are called.
        begun: Whether that container began on this stage, not on an earlier one.
        reached: Whether one of its blocks was called here.
        layer: Layer whose block was called last.
        output: Output of the last block.
        past: Outputs of the last blocks of the containers that have ended.
        outputs, seen, captured: Values collected over the blocks: outputs of blocks, inputs of
            hooks, and values captured by transformers.
    """

    stage: int
    place: BlockPlace
    training: bool = False
    received: Crossing | None = None
    passes: Counter[int] = field(default_factory=Counter)
    container: int = field(init=False)
    begun: bool = True
    reached: bool = False
    layer: Layer | None = None
    output: Any = None
    past: tuple[Form, ...] = ()
    outputs: dict[str, Any] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)
    captured: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    lost: Origin = field(default_factory=lambda: Origin(why=LOST))
    true: Origin = field(default_factory=Origin)
    unsent: Origin = field(default_factory=lambda: Origin(why=NOT_PASSED))
    _given: dict[Path, list[Tensor]] = field(default_factory=dict)
    _called: set[str] = field(default_factory=set)
    _arguments: object = ()
    _before: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    _changed: list[tuple[Tensor, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.container = self.place.container
        if self.received is None:
            return
        form = self.received.form
        self.past = (
            form.past
            if self.place.inside
            else (*form.past, Form(tensors=form.tensors, output=form.output))
        )
        collected = rebuild(form.collected, self.received.tensors)
        self.outputs, self.seen, self.captured = (
            collected if collected is not None else ({}, [], {})
        )
        self.begun = not self.place.inside
        self.output = self.received_output if self.place.inside else None

    def begin_layer(self, layers: Mapping[int, Sequence[Layer]]) -> Layer:
        """Return the layer that this call of a block computes.

        ``layers`` are the block's layers on each local stage, each called once and in order.
        """
        here = layers.get(self.stage) or next(iter(layers.values()))
        self.layer = next((layer for layer in here if layer.name not in self._called), here[-1])
        self._called.add(self.layer.name)
        return self.layer

    def begin_container(self, container: int) -> None:
        """Start another container, whose blocks are called from now on."""
        self.container = container
        self.begun = True
        self.reached = False
        self.output = None
        self._given.clear()

    def end(self) -> None:
        """End the run: later operations, such as a recomputation, do not belong to it."""
        for origin in (self.lost, self.true, self.unsent):
            origin.over = True
            origin.written.clear()

    # ---- outputs ---------------------------------------------------------------------------------

    @property
    def blocks_called(self) -> bool:
        """Return True if the blocks whose output was received have been called."""
        return self.passes[self.place.received] > 0

    @property
    def collected(self) -> tuple[object, ...] | None:
        """Return everything collected over the blocks up to here; None if there is nothing."""
        captured = (
            {**self.captured, self.container: captured_outputs()}
            if captured_outputs()
            else self.captured
        )
        parts = (self.outputs, self.seen, captured)
        return parts if any(parts) else None

    @property
    def received_output(self) -> Any:
        """Return the output of the block before the stage, which must exist."""
        assert self.received is not None
        return rebuild(self.received.form.output, self.received.tensors, self.unknown)

    def unknown(self, tensor: Tensor | None = None) -> Tensor:
        """Return a tensor that may be passed on, but not used."""
        return FirstStageValue.mark(
            torch.empty(0) if tensor is None else tensor.detach(), self.unsent
        )

    def follow_backward_hooks(self, given: object) -> None:
        """Replace ``output`` by the tensors in ``given`` that the last block's backward hooks returned."""
        replaced = {
            edge: tensor
            for _, tensor in tensors_in(given)
            if (edge := output_before_hooks(tensor)) is not None
        }
        if replaced:
            self.output = substitute(
                self.output,
                lambda _path, tensor: replaced.get((tensor.grad_fn, tensor.output_nr), tensor),
            )

    def returned_ids(self) -> set[int]:
        """Return the ids of the tensors that the last block returned."""
        return {id(tensor) for _, tensor in tensors_in(self.output)}

    # ---- one argument ----------------------------------------------------------------------------

    def argument(self, name: str, path: Path, tensor: Tensor) -> Tensor:
        """Return the argument of a local block where the model passes ``tensor``.

        No block returned ``tensor``.
        """
        if self.begun or self.received is None:
            if self._is_lost(tensor):
                place = "between" if self.container else "before"
                raise StageError(
                    f"block '{name}' has an input ({_place(path)}) that modules of another pipeline "
                    "stage computed. Name these modules in the plan as ones that run before the "
                    f"block: ParallelPlan({place}=(...,)), or use pipeline_parallel_size=1"
                )
            if self._is_foreign(tensor) or self.needs_gradient(tensor):
                self._given.setdefault(path, []).append(tensor)
            return plain(tensor)
        recorded = replacement(tensor)
        if recorded is not None and self._entered(recorded):
            return recorded
        extra = next(
            (self.received.tensors[i] for place, i in self.received.form.extras if place == path),
            None,
        )
        if extra is None:
            if self._is_foreign(tensor):
                raise StageError(
                    f"block '{name}' has an input ({_place(path)}) that was computed before the "
                    "repeated blocks, but no block up to the first one of the next pipeline stage "
                    "receives it there, so it is not sent. Pass it to every block, or use "
                    "pipeline_parallel_size=1"
                )
            return tensor
        if not (self._is_foreign(tensor) or self.needs_gradient(tensor)):
            return tensor
        if self._given.setdefault(path, [tensor])[0] is not tensor:
            raise StageError(
                f"block '{name}' has another input ({_place(path)}) than the block before it, "
                "computed outside the blocks. Apart from the outputs of blocks, an input that "
                "crosses a stage boundary must be the same tensor for all blocks. Compute it inside "
                "the blocks, or use pipeline_parallel_size=1"
            )
        put_instead(tensor, extra)
        return extra

    def note_arguments(self, arguments: object) -> None:
        """Note the arguments of a local block before its forward, in training."""
        self._arguments = arguments
        self._before = {
            id(tensor): (tensor, _version(tensor)) for _, tensor in tensors_in(arguments)
        }

    def check_arguments(self, name: str) -> None:
        """Check that block ``name`` has put no tensors into containers that it received.

        Only what it returns is sent to the next stage. A new entry of a dictionary may be one that
        every block computes if it is missing, and causes a warning. Tensors that it has changed in place are
        noted: a block of the next stage must not receive them.
        """
        returned_ids = self.returned_ids()
        for path, tensor in tensors_in(self._arguments):
            if id(tensor) in returned_ids:
                continue
            if id(tensor) not in self._before:
                if isinstance(path[-1], int):
                    raise changes_argument(name)
                warnings.warn(
                    f"block '{name}' stores a tensor under {path[-1]!r} in a dictionary that it "
                    "receives. The next pipeline stage does not get it. If later blocks do not "
                    "compute it again, return it from the block and pass it to the next one",
                    stacklevel=2,
                )
                continue
            is_changed = _version(tensor) != self._before[id(tensor)][1]
            if is_changed and not self.needs_gradient(tensor):
                self._changed.append((tensor, name))

    def check_unchanged(self, tensor: Tensor) -> None:
        """Check that no block has changed ``tensor``, which the next stage computes itself."""
        for changed, name in self._changed:
            if tensor is changed:
                raise changes_argument(name)

    def check_entrance(self, name: str, given: Sequence[object]) -> None:
        """Check that the first block of the stage gets exactly the tensors that were received.

        Otherwise the model computes something between its blocks, which would be computed once more
        after the boundary.
        """
        if self.begun or self.received is None:
            return
        argument_ids = {id(tensor) for value in given for _, tensor in tensors_in(value)}
        tensors = tensors_in(self.received_output)
        if any(self._entered(tensor) and id(tensor) not in argument_ids for _, tensor in tensors):
            raise computed_between(name)

    def known_extras(self) -> Iterator[tuple[Path, Tensor]]:
        """Yield extras that later stages may need, whether or not the next block receives them."""
        if not self.begun and self.received is not None:
            yield from (
                (path, self.received.tensors[index]) for path, index in self.received.form.extras
            )
            return
        for path, (first, *later) in self._given.items():
            if self._is_foreign(first) and all(tensor is first for tensor in later):
                yield path, first

    def is_extra(self, name: str, path: Path, tensor: Tensor) -> bool:
        """Return True if the next stage needs ``tensor``, which no block returned."""
        if not self.begun:
            argument = self.argument(name, path, tensor)
            if argument is tensor and self.needs_gradient(tensor) and not self._entered(tensor):
                raise computed_between(name)
            return False
        if self._is_lost(tensor):
            return False  # Refused where it is needed.
        if self._is_foreign(tensor):
            return True
        if not self.needs_gradient(tensor):
            return False
        if not any(tensor is earlier for tensors in self._given.values() for earlier in tensors):
            raise computed_between(name)
        return True

    def needs_gradient(self, tensor: Tensor) -> bool:
        """Return True if a gradient must come back for ``tensor``.

        A parameter that is passed as an argument needs none: every stage has its gradient itself.
        """
        return self.training and tensor.requires_grad and not isinstance(tensor, nn.Parameter)

    def _is_foreign(self, tensor: Tensor) -> bool:
        return (
            isinstance(tensor, FirstStageValue)
            or self.lost.has_written(tensor)
            or self.true.has_written(tensor)
        )

    def _is_lost(self, tensor: Tensor) -> bool:
        return self.lost.has_written(tensor) or (
            isinstance(tensor, FirstStageValue) and tensor.origin.why is not None
        )

    def _entered(self, tensor: Tensor) -> bool:
        return self.received is not None and any(
            tensor is received for received in self.received.tensors
        )


# ---- Error messages for tensors that cannot cross a stage boundary, with the remedy --------------


LOST = (
    "the code between or after the repeated blocks (a sum around a block, a loss, a log) uses "
    "values that modules of an earlier pipeline stage computed before the blocks. Only inputs "
    "and outputs of blocks are sent to later stages. Move this code into the blocks, keep these "
    "modules, such as a teacher, on every stage (ParallelPlan(everywhere=('teacher',))), or use "
    "pipeline_parallel_size=1"
)
NOT_PASSED = (
    "the step uses a tensor that a block on an earlier pipeline stage returned, but the model "
    "does not pass it to the next block, so it is not sent. If the model collects outputs of "
    "its blocks (all hidden states, losses of routers, attention weights), send all of them "
    "with ParallelPlan(collects=True), carry a sum through the blocks (x, total = block(x, "
    "total)), or use pipeline_parallel_size=1"
)


def _place(path: Path) -> str:
    return f"argument {path[0]}" if isinstance(path[0], int) else f"'{path[0]}'"


def _version(tensor: Tensor) -> int:
    """Return the number of changes in place; a mask kept from a validation has no counter."""
    return 0 if tensor.is_inference() else tensor._version


def computed_between(name: str) -> StageError:
    """Return the error for a block whose input is not the previous block's output."""
    return StageError(
        f"the model computes something before block '{name}': the input of the block is not "
        "the output of the previous block. Move the computation into the blocks, or use "
        "pipeline_parallel_size=1"
    )


def changes_argument(name: str) -> StageError:
    """Return the error for a block that changes what the next stage computes itself."""
    return StageError(
        f"block '{name}' changes a tensor, a list or a dictionary that it receives, and the next "
        "pipeline stage does not get the change. Return the new value from the block and pass it "
        "to the next block, or use pipeline_parallel_size=1"
    )
