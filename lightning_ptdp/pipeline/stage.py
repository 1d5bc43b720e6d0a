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
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from lightning_ptdp.pipeline.boundary import Boundary
from lightning_ptdp.pipeline.containers import layers_of, places_of
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


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """Positions of the modules with parameters relative to the repeated containers.

    A module may be in two lists.

    Attributes:
        blocks: Dotted names of the containers, in call order; "" is the module itself.
        before: Names of the modules that run before the first container; they belong to the first
            stage.
        between: Names of the modules that run before a further container; they belong to the stages
            where one begins.
        after: Names of the modules that run after the last container; they belong to the last
            stage.
        everywhere: Names of the modules, among or inside of these, that every stage keeps.
    """

    blocks: tuple[str, ...]
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()

    def is_everywhere(self, name: str) -> bool:
        """Return True if every stage keeps module ``name`` or a module around it."""
        return any(f"{name}.".startswith(f"{replicated}.") for replicated in self.everywhere)

    def outermost_after(self, model: nn.Module) -> Iterator[str]:
        """Yield the names in ``after``.

        A module that contains one kept by every stage is replaced by its children.
        """
        names = list(self.after)
        while names:
            name = names.pop(0)
            if not any(f"{replicated}.".startswith(f"{name}.") for replicated in self.everywhere):
                yield name
            elif not self.is_everywhere(name):
                names[:0] = [
                    f"{name}.{key}" for key, _ in model.get_submodule(name).named_children()
                ]

    @property
    def shown(self) -> str:
        """Return the names of the containers, for a message."""
        return " and ".join(f"'{name}'" for name in self.blocks)


@dataclass(frozen=True, eq=False)
class _Slot:
    """One place in the module tree, with its placeholders and the stages that own its module."""

    parent: nn.Module
    key: str
    name: str
    stages: frozenset[int]
    earlier: Placeholder
    later: Placeholder

    @classmethod
    def of(
        cls,
        model: nn.Module,
        name: str,
        stages: Iterable[int],
        earlier: Placeholder,
        later: Placeholder,
    ) -> _Slot:
        """Return the slot for module ``name``."""
        parent, _, key = name.rpartition(".")
        return cls(model.get_submodule(parent), key, name, frozenset(stages), earlier, later)

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
        collects: Whether everything that blocks return crosses to all later stages, because the
            model uses it behind the blocks.

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
        keep_padded(model)
        self._layers = layers_of(model, parts.blocks)
        self.ranges = tuple(ranges)
        self._boundary = Boundary(places_of(self._layers, ranges), collects=collects)
        container_starts = [
            index for index, layer in enumerate(self._layers) if layer.is_first and layer.container
        ]
        self.starts = frozenset(
            stage
            for stage, layers in enumerate(ranges)
            if any(index in range(*layers) for index in container_starts)
        )
        self._slots = [
            *self._block_slots(model),
            *self._early_slots(model),
            *self._after_slots(model),
        ]
        remote = [slot for slot in self._slots if slot.stages.isdisjoint(stages)]
        self._early = [
            slot for slot in self._slots if isinstance(slot.earlier, Stub) and slot not in remote
        ]
        self._local = [layer for stage in stages for layer in self._layers[slice(*ranges[stage])]]
        # Collected now: hooks added later by keyed dropout and tensor parallelism are not the
        # user's.
        self._hooks = [
            h
            for layer in self._local
            for h in user_hooks(layer.name, model.get_submodule(layer.name))
        ]
        self._hooks += [
            h
            for s in self._early
            for h in user_hooks(s.name, model.get_submodule(s.name), inside=False)
        ]
        self.module_stages = self._module_stages(model)
        self._tables = {
            stage: [
                (s.parent._modules, s.key, s.placeholder(stage))
                for s in self._slots
                if stage not in s.stages
            ]
            for stage in stages
        }
        for slot in remote:
            slot.parent._modules[slot.key] = slot.placeholder(self.stages[0])
        self._static = len(self.stages) == 1
        self._model = model
        self._watched = False
        self._differentiable: dict[Hashable, tuple[bool, ...]] = {}
        self._settled: dict[int, tuple[Form, Form]] = {}

    def run(
        self, stage: int, received: Crossing | None, step: Callable[[], object], *, training: bool
    ) -> tuple[Any, bool]:
        """Run ``step`` as ``stage``.

        Returns:
            (return value of ``step``, True) on the last stage, else (the ``Crossing`` to send,
            False).

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
            is_behind = boundary.running.is_behind
        except StageExit as stage_exit:
            return self._with_gradients(
                stage, stage_exit.crossing
            ) if training else stage_exit.crossing, False
        finally:
            boundary.end()
        if stage != self.num_stages - 1:
            raise StageError(
                f"the step returned on pipeline stage {stage} of {self.num_stages} without "
                f"calling the next block of {self.parts.shown}: {_WHOLE_MODEL_ONCE}"
            )
        if received is not None and not is_behind:
            raise StageError(
                f"the step did not call the blocks of {self.parts.shown}: {_WHOLE_MODEL_ONCE}"
            )
        return known(output), True

    def _with_gradients(self, stage: int, crossing: Crossing) -> Crossing:
        """Decide which tensors receive a gradient, the first time that tensors of this kind cross.

        The decision may not change later, because the receiver learns it only once. Frozen
        parameters may be unfrozen during training, so if there are any, all floating-point tensors
        count.
        """
        form = crossing.form
        if stage in self._settled and (
            self._settled[stage][0] is form or self._settled[stage][0] == form
        ):
            return Crossing(crossing.tensors, self._settled[stage][1])
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
        flags = self._differentiable[key]
        if any(
            tensor.differentiable and not flag
            for tensor, flag in zip(form.tensors, flags, strict=True)
        ):
            raise StageError(
                f"a tensor that leaves pipeline stage {stage} needs a gradient, but did not in "
                "the first step. Blocks must detach the same tensors during the whole training"
            )
        tensors = tuple(
            dataclasses.replace(t, differentiable=flag)
            for t, flag in zip(form.tensors, flags, strict=True)
        )
        self._settled[stage] = form, dataclasses.replace(form, tensors=tensors)
        return Crossing(crossing.tensors, self._settled[stage][1])

    @property
    def earlier_blocks(self) -> list[EarlierBlock]:
        """Return the placeholders for blocks of earlier stages."""
        return [slot.earlier for slot in self._slots if isinstance(slot.earlier, EarlierBlock)]

    @contextlib.contextmanager
    def _active(self, stage: int) -> Iterator[None]:
        if self._static:
            yield
            return
        saved = [(modules, key, modules[key]) for modules, key, _ in self._tables[stage]]
        for modules, key, placeholder in self._tables[stage]:
            modules[key] = placeholder
        try:
            yield
        finally:
            for modules, key, module in saved:
                modules[key] = module

    def _module_stages(self, model: nn.Module) -> dict[str, frozenset[int] | None]:
        owners = {(id(slot.parent), slot.key): slot.stages for slot in self._slots}
        stages: dict[str, frozenset[int] | None] = {"": None}
        for name, module in model.named_modules(remove_duplicate=False):
            for key, child in module._modules.items():
                if child is not None:
                    stages[f"{name}.{key}" if name else key] = owners.get(
                        (id(module), key), stages[name]
                    )
        return stages

    def _block_slots(self, model: nn.Module) -> Iterator[_Slot]:
        for stage, (start, stop) in enumerate(self.ranges):
            for layer in self._layers[start:stop]:
                original = model.get_submodule(layer.name)
                earlier = EarlierBlock(layer, original, self._boundary)
                later = LaterBlock(layer, original, self._boundary)
                yield _Slot.of(model, layer.name, [stage], earlier, later)

    def _early_slots(self, model: nn.Module) -> Iterator[_Slot]:
        for top in dict.fromkeys((*self.parts.before, *self.parts.between)):
            stages = {0} if top in self.parts.before else set()
            stages |= self.starts if top in self.parts.between else set()
            for suffix, module in list(model.get_submodule(top).named_modules()):
                name = f"{top}.{suffix}" if suffix else top
                shape = stub_shape(module)
                if shape is not None and not self.parts.is_everywhere(name):
                    stub = Stub(name, module, self._boundary, shape)
                    yield _Slot.of(model, name, stages, stub, stub)

    def _after_slots(self, model: nn.Module) -> Iterator[_Slot]:
        for name in self.parts.outermost_after(model):
            absent = Absent(name, model.get_submodule(name), self._boundary)
            yield _Slot.of(model, name, [self.num_stages - 1], absent, absent)

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
        if not self._static or len(self.parts.blocks) > 1:
            # Installed later, the capture hooks would be missing on blocks of chunks that are out
            # of the tree at that time, and would run after the hook that leaves the step at the end
            # of a container.
            install_capture(self._model)
        placeholders = self.earlier_blocks
        for layer in self._local:
            block = self._model.get_submodule(layer.name)
            # Registered before the hook that may leave the step.
            watch_left(layer.name, block, placeholders)
            block.register_forward_pre_hook(
                eager(block, partial(self._boundary.arguments, layer)), with_kwargs=True
            )
            block.register_forward_hook(eager(block, partial(self._boundary.returned, layer)))


class WholeModel:
    """A model that is not cut: the one stage of a run without a pipeline."""

    num_stages = 1

    def run(
        self, stage: int, received: Crossing | None, step: Callable[[], object], *, training: bool
    ) -> tuple[Any, bool]:
        """Run ``step``; it is the first and the last stage at once."""
        assert stage == 0
        assert received is None
        return step(), True
