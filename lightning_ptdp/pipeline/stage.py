"""A pipeline stage of an unmodified model: how its forward is entered and left.

The user's ``training_step`` runs on every stage. While a stage runs, the blocks of the repeated
container that belong to other stages are placeholders::

    stage 1 of 3     embedding   block 0      block 1      block 2   block 3   block 4      head
                     stub        Earlier      Earlier      real      real      Later        never reached
                     zeros       return what was received                      leaves by raising StageExit(what crosses)

Placeholders hold no parameters, so the remaining parameters keep the names of the uncut model.
``boundary.py`` decides which tensors cross.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from lightning_ptdp.pipeline.boundary import Boundary
from lightning_ptdp.pipeline.containers import Layer, ModelParts, layers_of, places_of
from lightning_ptdp.pipeline.crossing import Crossing, Form, StageError, StageExit
from lightning_ptdp.pipeline.first_stage_values import known
from lightning_ptdp.pipeline.placeholders import (
    Absent,
    EarlierBlock,
    LaterBlock,
    Placeholder,
    Stub,
    stub_shape,
)
from lightning_ptdp.pipeline.remote_modules import eager, user_hooks, watch_left
from lightning_ptdp.shims.torch import keep_padded
from lightning_ptdp.shims.transformers import install_capture

_WHOLE_MODEL_ONCE = (
    "every step, also in evaluation, must run the whole model once. Move code that needs no "
    "model into a hook such as on_validation_epoch_end, return the loss times zero to skip a "
    "batch, or use pipeline_parallel_size=1"
)


@dataclass(frozen=True, eq=False)
class _Slot:
    """One place in the module tree, with its placeholders and the stages that own its module."""

    parent: nn.Module
    key: str
    name: str
    stages: frozenset[int]
    earlier: Placeholder
    later: Placeholder

    def placeholder(self, running: int) -> Placeholder:
        return self.earlier if min(self.stages) < running else self.later


class PipelineCut:
    """The stages of a model that one rank holds.

    Creating it removes from the module everything that no local stage owns.

    Args:
        model: The module whose step will run, cut in place.
        parts: Positions of its modules relative to the containers.
        ranges: Half-open layer ranges, one per stage.
        stages: Stages of this rank.
        collects: Whether everything that blocks return is sent to all later stages, because the
            model uses it after the blocks.

    Attributes:
        ranges: As given.
        starts: The stages on which a container other than the first begins.
        module_stages: Stages of every module of the uncut model, by name; None for modules that
            every stage keeps.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        parts: ModelParts,
        ranges: Sequence[tuple[int, int]],
        stages: Sequence[int],
        collects: bool = False,
    ) -> None:
        self.stages = tuple(stages)
        self.num_stages = len(ranges)
        self.parts = parts
        self.ranges = tuple(ranges)
        self._model = model
        keep_padded(model)
        self._layers = layers_of(model, parts.blocks)
        self._boundary = Boundary(places_of(self._layers, ranges), collects=collects)
        self.starts = frozenset(
            stage
            for stage, (start, stop) in enumerate(ranges)
            if any(layer.is_first and layer.container for layer in self._layers[start:stop])
        )
        self._slots = [*self._block_slots(), *self._early_slots(), *self._after_slots()]
        remote = [slot for slot in self._slots if slot.stages.isdisjoint(stages)]
        self._early = [
            slot for slot in self._slots if isinstance(slot.earlier, Stub) and slot not in remote
        ]
        local = [layer for stage in stages for layer in self._layers[slice(*ranges[stage])]]
        # Collected now: hooks added later by keyed dropout and tensor parallelism are not the
        # user's.
        hooked = [(layer.name, True) for layer in local]
        hooked += [(slot.name, False) for slot in self._early]
        self._hooks = [
            hooks
            for name, inside in hooked
            for hooks in user_hooks(name, model.get_submodule(name), inside=inside)
        ]
        self.module_stages = self._module_stages()
        # What to replace while a stage runs, if the rank holds several.
        self._tables = {
            stage: [
                (s.parent._modules, s.key, s.placeholder(stage))
                for s in self._slots
                if stage not in s.stages
            ]
            for stage in stages
            if len(self.stages) > 1
        }
        for slot in remote:
            slot.parent._modules[slot.key] = slot.placeholder(self.stages[0])
        self._watched = False
        self._differentiable: dict[Hashable, tuple[bool, ...]] = {}
        self._settled: dict[int, tuple[Form, Form]] = {}

    def run(
        self, stage: int, received: Crossing | None, step: Callable[[], object], *, training: bool
    ) -> Any:
        """Run ``step`` as ``stage``.

        Returns:
            The return value of ``step`` on the last stage, else the ``Crossing`` to send.

        Raises:
            StageError: The model does something that cannot be cut.
        """
        boundary = self._boundary
        if not self._watched:
            self._watch()
        boundary.begin(stage, received, training=training)
        try:
            with self._active(stage):
                output = step()
            blocks_called = boundary.running.blocks_called
        except StageExit as stage_exit:
            crossing = stage_exit.crossing
            return self._with_gradients(stage, crossing) if training else crossing
        finally:
            boundary.end()
        if stage != self.num_stages - 1:
            raise StageError(
                f"the step returned on pipeline stage {stage} of {self.num_stages} without "
                f"calling the next block of {self.parts.shown}: {_WHOLE_MODEL_ONCE}"
            )
        if received is not None and not blocks_called:
            raise StageError(
                f"the step did not call the blocks of {self.parts.shown}: {_WHOLE_MODEL_ONCE}"
            )
        return known(output)

    def _with_gradients(self, stage: int, crossing: Crossing) -> Crossing:
        """Decide which tensors receive a gradient, the first time that tensors of this form cross.

        The decision must not change later, because the receiver gets it only once. Frozen
        parameters may be unfrozen during training. If there are any, all floating-point tensors
        receive a gradient.
        """
        form = crossing.form
        settled = self._settled.get(stage)
        if settled is None or not (settled[0] is form or settled[0] == form):
            settled = self._settled[stage] = form, self._settle(stage, form)
        return Crossing(crossing.tensors, settled[1])

    def _settle(self, stage: int, form: Form) -> Form:
        key = (
            stage,
            repr((form.output, form.extras, form.collected)),
            tuple(tensor.dtype for tensor in form.tensors),
        )
        if key not in self._differentiable:
            frozen = any(not parameter.requires_grad for parameter in self._model.parameters())
            self._differentiable[key] = tuple(
                t.differentiable or (frozen and t.dtype.is_floating_point) for t in form.tensors
            )
        flagged = list(zip(form.tensors, self._differentiable[key], strict=True))
        if any(tensor.differentiable and not flag for tensor, flag in flagged):
            raise StageError(
                f"a tensor that leaves pipeline stage {stage} needs a gradient, but did not in "
                "the first step. Blocks must detach the same tensors during the whole training"
            )
        tensors = tuple(replace(tensor, differentiable=flag) for tensor, flag in flagged)
        return replace(form, tensors=tensors)

    @property
    def earlier_blocks(self) -> list[EarlierBlock]:
        """Return the placeholders for blocks of earlier stages."""
        return [slot.earlier for slot in self._slots if isinstance(slot.earlier, EarlierBlock)]

    @contextlib.contextmanager
    def _active(self, stage: int) -> Iterator[None]:
        table = self._tables.get(stage, [])
        saved = [(modules, key, modules[key]) for modules, key, _ in table]
        for modules, key, placeholder in table:
            modules[key] = placeholder
        try:
            yield
        finally:
            for modules, key, module in saved:
                modules[key] = module

    def _module_stages(self) -> dict[str, frozenset[int] | None]:
        owners = {(id(slot.parent), slot.key): slot.stages for slot in self._slots}
        stages: dict[str, frozenset[int] | None] = {"": None}
        for name, module in self._model.named_modules(remove_duplicate=False):
            for key, child in module._modules.items():
                if child is not None:
                    stages[f"{name}.{key}" if name else key] = owners.get(
                        (id(module), key), stages[name]
                    )
        return stages

    def _slot(
        self, name: str, stages: Iterable[int], earlier: Placeholder, later: Placeholder
    ) -> _Slot:
        parent, _, key = name.rpartition(".")
        module = self._model.get_submodule(parent)
        return _Slot(module, key, name, frozenset(stages), earlier, later)

    def _block_slots(self) -> Iterator[_Slot]:
        for stage, (start, stop) in enumerate(self.ranges):
            for layer in self._layers[start:stop]:
                original = self._model.get_submodule(layer.name)
                earlier = EarlierBlock(layer, original, self._boundary)
                later = LaterBlock(layer, original, self._boundary)
                yield self._slot(layer.name, [stage], earlier, later)

    def _early_slots(self) -> Iterator[_Slot]:
        for top in dict.fromkeys((*self.parts.before, *self.parts.between)):
            stages = {0} if top in self.parts.before else set()
            stages |= self.starts if top in self.parts.between else set()
            for name, module in list(self._model.get_submodule(top).named_modules(prefix=top)):
                shape = stub_shape(module)
                if shape is not None and not self.parts.is_everywhere(name):
                    stub = Stub(name, module, self._boundary, shape)
                    yield self._slot(name, stages, stub, stub)

    def _after_slots(self) -> Iterator[_Slot]:
        for name in self.parts.outermost_after(self._model):
            absent = Absent(name, self._model.get_submodule(name), self._boundary)
            yield self._slot(name, [self.num_stages - 1], absent, absent)

    def _watch(self) -> None:
        """Register hooks on the local modules.

        It runs in the first run, after sharding has put the final modules in place.
        """
        self._watched = True
        for hooks in self._hooks:
            hooks.watch(self._boundary.see)
        for slot in self._early:
            module = slot.parent._modules[slot.key]
            assert module is not None
            module.register_forward_hook(
                eager(module, partial(self._boundary.mark_true, slot.stages))
            )
        if self._tables or len(self.parts.blocks) > 1:
            # If the capture hooks were installed later, they would be missing on blocks of chunks
            # that are not in the module tree at that time. They would also run after the hook that
            # leaves the step at the end of a container.
            install_capture(self._model)
        placeholders = self.earlier_blocks
        # A module may be several layers.
        blocks: dict[nn.Module, dict[int, list[Layer]]] = {}
        for stage in self.stages:
            for layer in self._layers[slice(*self.ranges[stage])]:
                block = self._model.get_submodule(layer.name)
                blocks.setdefault(block, {}).setdefault(stage, []).append(layer)
        for block, layers in blocks.items():
            first = next(iter(layers.values()))[0]
            # Registered before the hook that may leave the step.
            watch_left(first.name, block, placeholders)
            # Prepended: it reads the model's arguments, not those that hooks on the block make of
            # them.
            block.register_forward_pre_hook(
                eager(block, partial(self._boundary.arguments, layers)),
                prepend=True,
                with_kwargs=True,
            )
            # A partial, because torch's compiler sets an attribute on it, which a method cannot have.
            block.register_forward_hook(eager(block, partial(self._boundary.returned)))
