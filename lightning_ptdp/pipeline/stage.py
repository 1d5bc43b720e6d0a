"""A stage of somebody's model: how its forward is entered and left without changing a line of it.

The user's ``training_step`` runs on every stage. While a stage runs, the blocks of the repeated container that live elsewhere are
placeholders::

    stage 1 of 3     embedding   block 0      block 1      block 2   block 3   block 4      head
                     stub        Earlier      Earlier      real      real      Later        never reached
                     zeros       hands on the received activation              leaves by raising StageExit(activation)

Placeholders hold no parameters, so the names of the parameters that remain are the uncut model's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Crossing", "ModelParts", "PipelineCut", "Placeholder", "StageError", "StageExit", "WholeModel"]

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


class StageError(RuntimeError):
    """The model's forward did something that a pipeline stage cannot honour; the message says what and how to mend it."""


@dataclass(frozen=True)
class Crossing:
    """What goes from one stage to the next.

    Attributes:
        tensor: The hidden state.
        wrap: 0 if blocks return the tensor itself, n >= 1 if they return a tuple of n with the hidden state first.
    """

    tensor: Tensor
    wrap: int = 0


class StageExit(BaseException):
    """Leaves the user's step at the end of a stage; a BaseException, so that ``except Exception`` lets it through."""

    def __init__(self, crossing: Crossing) -> None:
        super().__init__("left the step at the end of a pipeline stage")
        self.crossing = crossing


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """Where the modules with parameters stand relative to the repeated container.

    Attributes:
        blocks: Dotted name of the container; "" is the module itself.
        before: Names of the modules that run before it; they belong to the first stage.
        after: Names of the modules that run after it; they belong to the last stage.
    """

    blocks: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass
class _Port:
    """What all placeholders of a rank share while a stage runs."""

    incoming: Crossing | None = None
    wrap: int = 0
    passes: int = 0
    training: bool = False


class Placeholder(nn.Module):
    """Base of the stand-ins; keeps the plain attributes of the module that it stands for, since models inspect their layers."""

    def __init__(self, name: str, original: nn.Module, port: _Port) -> None:
        super().__init__()
        for key, value in vars(original).items():
            if not key.startswith("_") and key not in vars(self):
                self.__dict__[key] = value
        self.__dict__["_ptdp_name"] = name
        self.__dict__["_ptdp_port"] = port

    def __getattr__(self, key: str) -> Any:
        name = self.__dict__.get("_ptdp_name", "?")
        raise AttributeError(
            f"'{name}' lives on another pipeline stage, and its attribute '{key}' with it. A module whose weight is used "
            f"without calling the module must be tied instead (head.weight = {name}.weight), or be left out of the plan's "
            "before= and after= lists"
        )


class _EarlierBlock(Placeholder):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        port: _Port = self.__dict__["_ptdp_port"]
        assert port.incoming is not None
        if self.__dict__["_ptdp_name"].rpartition(".")[2] == self.__dict__["_ptdp_first"]:
            port.passes += 1
            if port.passes > 1:
                raise StageError(
                    "one step calls the repeated blocks more than once; a pipeline stage sends one hidden state a microbatch. "
                    "Concatenate the inputs along the batch dimension and call the model once, or use pipeline_parallel_size=1"
                )
        tensor, wrap = port.incoming.tensor, port.incoming.wrap
        return (tensor, *[None] * (wrap - 1)) if wrap else tensor


class _LaterBlock(Placeholder):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        port: _Port = self.__dict__["_ptdp_port"]
        hidden = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(hidden, Tensor):
            raise StageError(
                f"block '{self.__dict__['_ptdp_name']}' is called with {type(hidden).__name__} first; between pipeline stages "
                "the first argument of a block must be the hidden-state tensor"
            )
        others = [v for v in (*args[1:], *kwargs.values()) if v is not hidden]
        if port.training and any(isinstance(v, Tensor) and v.requires_grad for v in others):
            raise StageError(
                f"block '{self.__dict__['_ptdp_name']}' takes a second tensor that needs a gradient; one hidden state crosses "
                "a pipeline boundary. Compute it inside the block, or use pipeline_parallel_size=1"
            )
        raise StageExit(Crossing(hidden, port.wrap))


class _Absent(Placeholder):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StageError(
            f"'{self.__dict__['_ptdp_name']}' belongs to the last pipeline stage but was called before the repeated blocks; list "
            "it in the plan: ParallelPlan(before=(...,))"
        )


class _Stub(Placeholder):
    """Stands for a module before the blocks: zeros of the right shape, which the first placeholder block ignores."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.__dict__["_ptdp_port"].passes:
            raise StageError(
                f"'{self.__dict__['_ptdp_name']}' belongs to the first pipeline stage but was called after the repeated blocks. If it "
                "stands behind them, list it in the plan: ParallelPlan(after=(...,)); if the step calls the model more than once, "
                "concatenate the inputs along the batch dimension and call it once"
            )
        return self.__dict__["_ptdp_shape"](x)


def _stub_shape(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """How to make an output of the right shape without the module's weights; None if that is not known for its type."""
    if isinstance(module, nn.Embedding):
        width, dtype = module.embedding_dim, module.weight.dtype
        return partial(_zeros_after_lookup, width=width, dtype=dtype)
    if isinstance(module, nn.Linear):
        out = module.out_features
        return partial(_zeros_after_linear, width=out)
    if isinstance(module, _NORMS):
        return _unchanged
    return None


# Functions of the module, not closures: a cut model, and the Trainer that holds it, can be pickled.


def _zeros_after_lookup(x: Tensor, *, width: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(*x.shape, width, dtype=dtype, device=x.device)


def _zeros_after_linear(x: Tensor, *, width: int) -> Tensor:
    return x.new_zeros(*x.shape[:-1], width)


def _unchanged(x: Tensor) -> Tensor:
    return x


def _note_wrap(port: _Port, _module: nn.Module, _args: Any, output: Any) -> None:
    port.wrap = len(output) if isinstance(output, (tuple, list)) else 0


@dataclass(frozen=True)
class _Slot:
    """One place in the module tree, with its stand-ins and the stage that owns what belongs there."""

    parent: nn.Module
    key: str
    name: str
    stage: int
    stand_in: Mapping[str, nn.Module] = field(default_factory=dict)

    def placeholder(self, running: int) -> nn.Module:
        return self.stand_in["earlier" if self.stage < running else "later"]


class PipelineCut:
    """The stages of a model that one rank holds. Making it removes from the module what no local stage owns.

    Args:
        model: The module whose step will run, cut in place.
        parts: Where its modules stand.
        ranges: Half-open layer ranges, one a stage.
        stages: Stages of this rank.

    Attributes:
        module_stages: Stage of every module of the uncut model, by name; None for what every stage keeps.
    """

    def __init__(self, model: nn.Module, *, parts: ModelParts, ranges: Sequence[tuple[int, int]], stages: Sequence[int]) -> None:
        self.stages, self.num_stages, self.parts = tuple(stages), len(ranges), parts
        self._port = _Port()
        self._slots = [*self._block_slots(model, ranges), *self._before_slots(model), *self._after_slots(model)]
        self.module_stages = self._module_stages(model)
        self._tables = {
            stage: [(s.parent._modules, s.key, s.placeholder(stage)) for s in self._slots if s.stage != stage] for stage in stages
        }
        for slot in self._slots:
            if slot.stage not in self.stages:
                slot.parent._modules[slot.key] = slot.placeholder(self.stages[0])
        self._static = len(self.stages) == 1
        self._container, self._ranges, self._watched = model.get_submodule(parts.blocks), tuple(ranges), False

    def run(self, stage: int, received: Crossing | None, step: Callable[[], Any], *, training: bool) -> tuple[Any, bool]:
        """Run ``step`` as ``stage``: (its return value, True) on the last stage, else (the Crossing to send, False)."""
        port = self._port
        port.incoming, port.passes, port.training = received, 0, training
        if not self._watched:
            self._watch_blocks()
        try:
            with self._active(stage):
                output = step()
        except StageExit as leave:
            return leave.crossing, False
        finally:
            port.incoming = None
        if stage != self.num_stages - 1:
            raise StageError(
                f"the step returned on pipeline stage {stage} of {self.num_stages} without calling the next block of "
                f"'{self.parts.blocks}'; every step must run the whole model once"
            )
        if received is not None and not port.passes:
            raise StageError(
                f"the step did not call the blocks of '{self.parts.blocks}'; every step must run the whole model once"
            )
        return output, True

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

    def _module_stages(self, model: nn.Module) -> dict[str, int | None]:
        owner = {(id(slot.parent), slot.key): slot.stage for slot in self._slots}
        found: dict[str, int | None] = {"": None}

        def walk(module: nn.Module, prefix: str, stage: int | None) -> None:
            for key, child in module._modules.items():
                if child is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    found[name] = owner.get((id(module), key), stage)
                    walk(child, name, found[name])

        walk(model, "", None)
        return found

    def _block_slots(self, model: nn.Module, ranges: Sequence[tuple[int, int]]) -> Iterator[_Slot]:
        container = model.get_submodule(self.parts.blocks)
        keys = list(container._modules)
        for stage, (start, stop) in enumerate(ranges):
            for key in keys[start:stop]:
                original = container._modules[key]
                assert original is not None
                name = f"{self.parts.blocks}.{key}" if self.parts.blocks else key
                earlier, later = _EarlierBlock(name, original, self._port), _LaterBlock(name, original, self._port)
                earlier.__dict__["_ptdp_first"] = keys[0]
                yield _Slot(container, key, name, stage, {"earlier": earlier, "later": later})

    def _before_slots(self, model: nn.Module) -> Iterator[_Slot]:
        for top in self.parts.before:
            for suffix, module in list(model.get_submodule(top).named_modules()):
                name = f"{top}.{suffix}" if suffix else top
                shape = _stub_shape(module)
                if shape is None:
                    continue
                parent = model.get_submodule(name.rpartition(".")[0])
                stub = _Stub(name, module, self._port)
                stub.__dict__["_ptdp_shape"] = shape
                yield _Slot(parent, name.rpartition(".")[2], name, 0, {"earlier": stub, "later": stub})

    def _after_slots(self, model: nn.Module) -> Iterator[_Slot]:
        for name in self.parts.after:
            parent = model.get_submodule(name.rpartition(".")[0])
            absent = _Absent(name, model.get_submodule(name), self._port)
            yield _Slot(parent, name.rpartition(".")[2], name, self.num_stages - 1, {"earlier": absent, "later": absent})

    def _watch_blocks(self) -> None:
        """Watch the ends of the local stages (on the first run, when sharding has put the final modules in place).

        At the exit: whether blocks return a tensor or a tuple, since the next stage's placeholders must return the same. At the
        entrance: that the first block is given the very tensor that was received. If not, the model computes something between
        its blocks, which would be computed once more behind the boundary.
        """
        self._watched = True
        blocks = list(self._container._modules.items())
        for stage in self.stages:
            start, stop = self._ranges[stage]
            (name, first), (_, last) = blocks[start], blocks[stop - 1]
            assert first is not None and last is not None
            last.register_forward_hook(partial(_note_output, self._port))
            if stage:
                first.register_forward_pre_hook(partial(_check_input, self._port, name), with_kwargs=True)


def _note_output(port: _Port, _module: nn.Module, _args: Any, output: Any) -> None:
    port.wrap = len(output) if isinstance(output, (tuple, list)) else 0


def _check_input(port: _Port, name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = args[0] if args else next(iter(kwargs.values()), None)
    if port.incoming is not None and given is not port.incoming.tensor:
        raise StageError(
            f"something is computed between the repeated blocks, before block '{name}': its input is not what the block before it "
            "returned. At a pipeline boundary that would be computed twice; move it into the blocks"
        )


class WholeModel:
    """A model that is not cut: the one stage of a run without a pipeline."""

    num_stages = 1

    def run(self, stage: int, received: Crossing | None, step: Callable[[], Any], *, training: bool) -> tuple[Any, bool]:
        """Run ``step``; it is the first and the last stage at once."""
        assert stage == 0
        assert received is None
        return step(), True
