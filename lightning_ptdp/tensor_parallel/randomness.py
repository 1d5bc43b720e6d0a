"""Random numbers inside tensor-parallel regions.

If all ranks hold the same activation, they must drop the same elements. If each rank holds a part
(heads, features, a slice of the sequence), they must drop different ones. A step therefore draws
from a stream that all ranks share, and inside a region from a stream of the rank's own::

    no sequence parallelism   from a column layer to the next row layer
    sequence parallelism      split within the blocks: in the blocks; in ``Whole`` modules as
                              without sequence parallelism
                              split from embedding to head: everywhere; no stream is shared

The seed of a rank's own stream is drawn from the shared one, so recomputation of activations
replays both. If a block with whole modules is recomputed inside a region, it needs the state of the
shared stream too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.base.random import States, derive_seed, reseed, set_states
from lightning_ptdp.forward.surroundings import Context, Contexts, Forward, Surrounding
from lightning_ptdp.shims.torch import untraced
from lightning_ptdp.tensor_parallel.region import sees_full_sequence


class Randomness(Protocol):
    """Interface notified when a forward enters and leaves tensor-parallel regions."""

    def enter(self) -> None:
        """Enter a region, in which activations are split."""

    def leave(self) -> None:
        """Leave the region; activations are the same on all ranks again."""

    def within(self, *, split: bool) -> Context:
        """Draw for a split (or a replicated) activation, regardless of the next module."""


@dataclass(kw_only=True, eq=False)
class SplitRandomness(Surrounding):
    """Switch of torch's generators between the group's stream and the rank's own.

    Attributes:
        rank: Rank in the tensor group.
        device: Device whose generator is switched besides the CPU's.
        blocks: Name of the container of blocks, if the sequence is split only within them; None: no
            sequence parallelism.
        returns: True if the blocks contain ``Whole`` modules, which return to the shared stream.
    """

    rank: int
    device: torch.device
    blocks: str | None = None
    returns: bool = False
    _shared: States | None = None
    _drops: bool = True

    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Install hooks that follow where the module enters and leaves split regions."""
        self._drops = any(map(drops, module.modules()))
        return give_randomness(
            module,
            self,
            blocks=None if self.blocks is None else module.get_submodule(self.blocks),
        )

    def around(self, forward: Forward) -> Context:
        """Start a step on the shared stream."""
        return self._from(None)

    @property
    def recomputes(self) -> bool:
        """Return True if a recomputation may return to the shared stream."""
        return self.returns

    def recomputation(self, forward: Forward) -> Contexts | None:
        """Start the recomputation with the same states of both streams."""
        return contextlib.nullcontext(), self._from(self._shared)

    @contextlib.contextmanager
    def _from(self, shared: States | None) -> Iterator[None]:
        outer = self._shared
        self._shared = shared
        try:
            yield
        finally:
            self._shared = outer

    def enter(self) -> None:
        """Enter a region, in which activations are split; does nothing inside of a region."""
        if self._drops or not torch.compiler.is_compiling():
            self._enter()

    def leave(self) -> None:
        """Leave the region; activations are the same on all ranks again."""
        if self._drops or not torch.compiler.is_compiling():
            self._leave()

    @contextlib.contextmanager
    def within(self, *, split: bool) -> Iterator[None]:
        """Draw for a split (or a replicated) activation, regardless of the next module."""
        change, restore = (self.enter, self.leave) if split else (self.leave, self.enter)
        changes = (self._shared is not None) != split
        if changes:
            change()
        yield
        if changes:
            restore()

    @untraced
    def _enter(self) -> None:
        if self._shared is not None:
            return
        self._shared = reseed(derive_seed(int(torch.randint(2**62, ())), self.rank), self.device)

    @untraced
    def _leave(self) -> None:
        if self._shared is None:
            return
        shared = self._shared
        self._shared = None
        set_states(shared, self.device)


class PlacedDropout(nn.Dropout):
    """Dropout with a fixed declaration of whether its input is split over the tensor group.

    It does not depend on the region state that the previous layer left.
    """

    def __init__(self, p: float, *, split: bool) -> None:
        super().__init__(p)
        self.split = split
        self.randomness: Randomness | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout like ``nn.Dropout``, from the stream that fits the input."""
        if self.randomness is None or not self.training:
            return F.dropout(x, self.p, self.training)
        with self.randomness.within(split=self.split):
            return F.dropout(x, self.p, self.training)


def drops(module: nn.Module) -> bool:
    """Return True if an attribute shows that the module drops elements.

    Such an attribute is ``dropout=0.1``, or the ``p`` of an ``nn.Dropout``.
    """
    rates = [
        value
        for name, value in vars(module).items()
        if "drop" in f"{type(module).__name__ if name == 'p' else name}".lower()
    ]
    return any(isinstance(value, float) and value > 0 for value in rates)


def give_randomness(
    module: nn.Module, randomness: Randomness, *, blocks: nn.Module | None = None
) -> Callable[[], None]:
    """Make a module draw from the rank's own stream where activations are split.

    Applies in training only.

    Args:
        module: Module that contains parallel layers.
        randomness: Switches the streams.
        blocks: The container of blocks, if the sequence is split only within them; None: no
            sequence parallelism.

    Returns:
        A function that undoes the change.
    """
    undo = contextlib.ExitStack()
    # Split layers in a whole module begin and end regions, as without sequence parallelism.
    joined = {
        layer for full in module.modules() if sees_full_sequence(full) for layer in full.modules()
    }
    for layer in module.modules():
        switches = blocks is None or layer in joined or isinstance(layer, PlacedDropout)
        if "randomness" in vars(layer) and switches:
            vars(layer)["randomness"] = randomness
            undo.callback(setattr, layer, "randomness", None)
    if blocks is not None:
        enter = partial(_enter, randomness)
        leave = partial(_leave, randomness)
        for block in blocks.children():
            _around(block, enter, leave, undo)
            for child in (module for module in block.modules() if sees_full_sequence(module)):
                _around(child, leave, enter, undo)
    return undo.close


def _around(
    module: nn.Module,
    before: Callable[..., None],
    after: Callable[..., None],
    undo: contextlib.ExitStack,
) -> None:
    undo.enter_context(module.register_forward_pre_hook(before))
    undo.enter_context(module.register_forward_hook(after, always_call=True))


def _enter(randomness: Randomness, module: nn.Module, *_: object) -> None:
    if module.training:
        randomness.enter()


def _leave(randomness: Randomness, *_: object) -> None:
    randomness.leave()
