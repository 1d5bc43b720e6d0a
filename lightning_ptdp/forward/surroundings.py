"""Contexts around a forward: one ordered list of objects with one small protocol.

Whoever runs one forward of one stage on one microbatch enters the list around it, and recomputation
enters it around running a part of that forward again; neither knows what is in the list."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_ptdp.world.mesh import Group

__all__ = ["Context", "Contexts", "Deferred", "Forward", "Part", "Surrounding", "Surroundings"]

Context = AbstractContextManager[object]
Contexts = tuple[Context, Context]


class Part(Protocol):
    """Note that a forward saw a part of its microbatch, and how its result counts."""

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""

    @property
    def group(self) -> Group:
        """The ranks that saw the other parts."""

    @property
    def shifted_targets(self) -> Tensor | None:
        """() int64, labels of this part where the model shifts them itself; else None."""

    def share(self, loss: Tensor) -> Tensor:
        """Weight of this part's mean loss, so that the mean over the group is the mean over all
        labels; collective."""


class Deferred(Protocol):
    """Gradients that a backward leaves for later, by (stage, microbatch)."""

    def collecting(self, key: Hashable) -> Context:
        """Around the backward of ``key``."""

    def parameters(self, key: Hashable) -> list[Tensor]:
        """Whose gradients ``run`` adds to."""

    def run(self, key: Hashable, done: Callable[[Tensor], None] | None = None) -> None:
        """Compute them; ``done`` is called with each parameter that is complete."""


@dataclass(kw_only=True)
class Forward:
    """One forward of one stage on one microbatch.

    Attributes:
        hook: "training_step", "validation_step", "test_step" or "predict_step".
        step: Tells training steps apart.
        stage: The pipeline stage.
        microbatch: Its number in the batch.
        whole: The microbatch, the same on all ranks of a replica.
        seed: Of the step's random numbers; None: it draws from the process's generators.
        splits_backward: Its backward comes in two halves, of which the second may compute what the
            first has deferred.
        draws_alike: All ranks of the replica draw from one stream now.
        batch: What the user's step is called with; a surrounding may put this rank's part in the
            place of ``whole``.
        part: What a surrounding that did so has to say.
        deferred: Where a surrounding keeps what the backward leaves for later.
    """

    hook: str
    step: int = 0
    stage: int = 0
    microbatch: int = 0
    whole: Any = None
    seed: int | None = None
    splits_backward: bool = False
    draws_alike: bool = field(default=False, init=False)
    batch: Any = field(init=False)
    part: Part | None = None
    deferred: Deferred | None = None

    def __post_init__(self) -> None:
        self.batch = self.whole

    @property
    def training(self) -> bool:
        """Return True if a backward follows."""
        return self.hook == "training_step"


class Surrounding:
    """One entry of the list. It overrides what it has to do with."""

    @property
    def recomputes(self) -> bool:
        """Return True if ``recomputation`` may do something; compiled blocks are not compiled where
        one does."""
        return type(self).recomputation is not Surrounding.recomputation

    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Look at this rank's part of the LightningModule before the first forward, and follow its
        calls.

        Returns:
            A function that undoes it.

        Raises:
            ValueError: The module cannot run in here.
        """
        return _nothing

    def around(self, forward: Forward) -> Context:
        """Around the user's step."""
        return contextlib.nullcontext()

    def recomputation(self, forward: Forward) -> Contexts | None:
        """Around a part of ``forward`` that will be recomputed, and around its recomputation; None
        if that needs nothing."""
        return None


class Surroundings:
    """The list.

    Attributes:
        entries: The outermost first.
    """

    def __init__(self, entries: Iterable[Surrounding] = ()) -> None:
        self.entries = tuple(entries)
        self._running: Forward | None = None

    def __deepcopy__(self, memo: Any) -> Surroundings:
        """Itself: the copy of a module that is recomputed runs in what this rank has once."""
        return self

    @property
    def recompute(self) -> bool:
        """Return True if a recomputation needs a context at all."""
        return any(entry.recomputes for entry in self.entries)

    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Show the module to all entries; returns a function that undoes it."""
        with contextlib.ExitStack() as undo:
            for entry in reversed(
                self.entries
            ):  # an outer one puts its hooks around those of an inner one
                undo.callback(entry.attach(module))
            return undo.pop_all().close

    @contextlib.contextmanager
    def around(self, forward: Forward) -> Iterator[None]:
        """Around one forward."""
        try:
            with self._running_in(forward, (entry.around(forward) for entry in self.entries)):
                yield
        except Exception as error:
            error.add_note(
                f"in {forward.hook}, microbatch {forward.microbatch}, stage {forward.stage}"
            )
            raise

    def recomputation(self) -> Contexts:
        """Contexts of a part of the forward that runs now, and of its recomputation: the
        ``context_fn`` of ``torch.utils.checkpoint.checkpoint``."""
        running = self._running
        pairs = (
            []
            if running is None
            else [entry.recomputation(running) for entry in self.entries if entry.recomputes]
        )
        found = [pair for pair in pairs if pair is not None]
        if running is None or not found:
            return contextlib.nullcontext(), contextlib.nullcontext()
        first, again = zip(*found, strict=True)
        return self._running_in(running, first), self._running_in(running, again)

    @contextlib.contextmanager
    def _running_in(self, forward: Forward, contexts: Iterable[Context]) -> Iterator[None]:
        outer, self._running = self._running, forward
        try:
            with contextlib.ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                yield
        finally:
            self._running = outer


def _nothing() -> None:
    """Undoes nothing."""
