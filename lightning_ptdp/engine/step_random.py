"""Random numbers of the user's step, the same in every layout.

A microbatch has one stream outside of the repeated blocks, which is the same on every stage, and
one stream for each block::

    outside   mask, noise, mixup, embedding's dropout   |            |            |   after blocks
    block 0                                             |  dropout   |            |
    block 1                                             |            |  dropout   |

A stage without a block therefore keeps its place in the outer stream. Streams are seeded by (run,
hook, step, microbatch of all replicas, block). The generators of torch, numpy and Python are
switched. Those of numpy and Python have large states, so in blocks they are switched only if the
blocks' code uses them. Blocks that draw nothing (``RandomDraws``) have no stream.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lightning_ptdp.base.random import States, derive_seed, reseed, set_states
from lightning_ptdp.forward.random_draws import RandomDraws
from lightning_ptdp.forward.surroundings import Context, Contexts, Forward, Surrounding
from lightning_ptdp.shims.lightning import is_compiled as is_compiled_module
from lightning_ptdp.shims.torch import is_compiled, untraced

_LIBRARIES = ("torch", "builtins")
_NUMPY: Any = np.random  # its stubs lack two functions


class _Outer(NamedTuple):
    """States of the generators outside of a block; None: not switched."""

    torch: States
    numpy: Any
    python: Any


class StepRandomness(Surrounding):
    """Seeds a forward and the blocks in it.

    Args:
        blocks: Number in the whole model -> name, for the local blocks and for other modules with a
            stream of their own.
        module: This rank's part of the LightningModule.
        absent: Placeholders for blocks of earlier stages.
        place: Coordinates that distinguish ranks whose blocks have other slices of the sequence.
        device: Device whose generator is switched in addition to the CPU's.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        blocks: Mapping[int, str],
        absent: Sequence[nn.Module],
        place: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._blocks = blocks
        self._absent = absent
        self._place = place
        self._device = device
        names = {
            name for block in blocks.values() for name in _defined_in(module.get_submodule(block))
        }
        imports = {origin for name in names for origin in _known_by(name)}
        self._python = random in imports
        self._numpy = np in imports
        self._draws = {
            number: RandomDraws(module.get_submodule(name)) for number, name in blocks.items()
        }
        self._switching = set[int]()
        self._bits: list[Any] = []
        self._outer: list[_Outer] = []
        self._seed: int | None = None
        self._forward: Forward | None = None

    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Register hooks on the blocks, and return a function that removes them."""
        undo = contextlib.ExitStack()
        for number, name in self._blocks.items():
            if _is_inside_graph(module, name):
                # Hooks would break the graph: its blocks draw from the stream around it.
                continue
            block = module.get_submodule(name)
            # Partials, because a method cannot be marked as untraced.
            enter = partial(self._enter, number)
            leave = partial(self._leave, number)
            if is_compiled(block):
                enter = untraced(enter)
                leave = untraced(leave)
            undo.enter_context(block.register_forward_pre_hook(enter, prepend=True))
            undo.enter_context(block.register_forward_hook(leave))
        for block in self._absent:
            undo.enter_context(block.register_forward_pre_hook(_pass))
        return undo.close

    def around(self, forward: Forward) -> Context:
        """Draw from the microbatch's stream."""
        if forward.seed is None:
            return contextlib.nullcontext()
        return self._drawing(forward, forward.seed)

    @contextlib.contextmanager
    def _drawing(self, forward: Forward, seed: int) -> Iterator[None]:
        self._switch(seed, numpy=True, python=True)
        self._forward = forward
        forward.shares_stream = True
        self._seed = derive_seed(seed, *self._place)
        always = self._numpy or self._python
        self._switching = {number for number, draws in self._draws.items() if always or draws()}
        try:
            yield
        finally:
            self._seed = None
            self._forward = None
            forward.shares_stream = False
            del self._outer[1:]  # states of blocks that StageExit or an error has left
            self._switch_back()

    def _enter(self, number: int, *_: object) -> None:
        if self._seed is None:
            return
        if number in self._switching:
            self._switch(derive_seed(self._seed, number), numpy=self._numpy, python=self._python)
            self._mark()
        else:
            _pass()

    def _leave(self, number: int, *_: object) -> None:
        if self._seed is not None and number in self._switching:
            self._switch_back()
            self._mark()

    def _mark(self) -> None:
        if self._forward is not None:
            self._forward.shares_stream = len(self._outer) == 1

    def _switch(self, seed: int, *, numpy: bool, python: bool) -> None:
        depth = len(self._outer)
        bits = None
        state = None
        if numpy:
            bits = _NUMPY.get_bit_generator()
            if depth == len(self._bits):
                self._bits.append(np.random.MT19937())
            # Switching generators is 100 times as fast as saving and restoring the state of one.
            _NUMPY.set_bit_generator(self._bits[depth])
            np.random.seed(seed % 2**32)
        else:
            _pass()
        if python:
            state = random.getstate()
            random.seed(seed)
        self._outer.append(_Outer(reseed(seed, self._device), bits, state))

    def _switch_back(self) -> None:
        outer = self._outer.pop()
        set_states(outer.torch, self._device)
        if outer.numpy is not None:
            _NUMPY.set_bit_generator(outer.numpy)
        if outer.python is not None:
            random.setstate(outer.python)

    # ---- recomputation ---------------------------------------------------------------------------

    @property
    def recomputes(self) -> bool:
        """Return True if blocks may draw from numpy or Python; torch replays its own generators."""
        return self._numpy or self._python

    def recomputation(self, forward: Forward) -> Contexts | None:
        """Replay numpy's and Python's numbers."""
        if forward.seed is None:
            return None
        states: list[Any] = []
        return self._noting(states), self._replaying(states)

    @contextlib.contextmanager
    def _noting(self, states: list[Any]) -> Iterator[None]:
        states[:] = np.random.get_state(), random.getstate()
        yield

    @contextlib.contextmanager
    def _replaying(self, states: list[Any]) -> Iterator[None]:
        current = np.random.get_state(), random.getstate()
        _set_host_states(*states)
        try:
            yield
        finally:
            _set_host_states(*current)


def _is_inside_graph(module: nn.Module, block: str) -> bool:
    """Return True if a module around the block is compiled as a whole."""
    names = block.split(".")
    around = (module.get_submodule(".".join(names[:depth])) for depth in range(len(names)))
    return is_compiled_module(module) or any(map(is_compiled, around))


def _pass(*_: object) -> None:
    """Drop the second of a pair of normal numbers that numpy draws together.

    Switching the generator drops it too.
    """
    _NUMPY.set_bit_generator(_NUMPY.get_bit_generator())


def _set_host_states(numpy: Any, python: Any) -> None:
    np.random.set_state(numpy)
    random.setstate(python)


def _defined_in(block: nn.Module) -> set[str]:
    """Return the names of the Python modules that define the classes in a block.

    This includes the classes of the attributes of the block's modules.
    """
    objects = [value for module in block.modules() for value in (module, *vars(module).values())]
    kinds = {kind for value in objects for kind in type(value).__mro__}
    return {
        kind.__module__ for kind in kinds if kind.__module__.partition(".")[0] not in _LIBRARIES
    }


def _known_by(name: str) -> Iterator[ModuleType]:
    """Yield ``random`` and ``numpy`` if module ``name`` holds them or one of their functions."""
    for value in vars(sys.modules.get(name, object)).values():
        try:
            origin = (
                value.__name__
                if isinstance(value, ModuleType)
                else str(getattr(value, "__module__", None) or "")
            )
            owner = getattr(value, "__self__", None)
        except Exception:
            continue  # placeholder of an optional package that is not installed
        if origin == "random" or isinstance(owner, random.Random):
            yield random
        elif origin.partition(".")[0] == "numpy":
            yield np
