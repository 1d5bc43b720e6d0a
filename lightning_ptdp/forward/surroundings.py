"""Contexts around a forward: one ordered list of objects with one small protocol.

The code that runs one forward of one stage on one microbatch enters the list around it.
Recomputation enters the list around the part of that forward that it runs again. Neither depends on
the content of the list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from lightning_ptdp.world.mesh import Group

if TYPE_CHECKING:
    from lightning_ptdp.forward.deferred_weight_gradients import WeightGradients

Context = AbstractContextManager[object]
Contexts = tuple[Context, Context]


class BatchPart(Protocol):
    """Part of a microbatch that a forward used, and its weight in the result."""

    @property
    def length(self) -> int:
        """Return the number of tokens of the full sequence."""

    @property
    def group(self) -> Group:
        """Return the group of the ranks with the other parts."""

    @property
    def samples(self) -> int:
        """Return the number of samples of the microbatch."""

    @property
    def num_targets(self) -> Tensor | None:
        """Return the number of labels of this part, () int64, if the batch has labels."""

    @property
    def shifted_targets(self) -> Tensor | None:
        """Return the number of labels of this part, () int64, if the model shifts them itself.

        Otherwise return None.
        """

    def share(self, loss: Tensor) -> Tensor:
        """Return the weight of this part's mean loss; collective.

        With it, the mean over the group is the mean over all labels.
        """


@dataclass(kw_only=True)
class Forward:
    """One forward of one stage on one microbatch.

    Attributes:
        hook: "training_step", "validation_step", "test_step" or "predict_step".
        step: Number of the training step.
        stage: The pipeline stage.
        microbatch: Its number in the batch.
        full_batch: The microbatch, the same on all ranks of a replica.
        seed: Seed of the step's random numbers; None: it draws from the process's generators.
        splits_backward: Its backward comes in two halves, and the second may compute gradients that
            the first has deferred.
        shares_stream: True while all ranks of the replica draw from the same stream.
        batch: Argument of the user's step; a surrounding may replace ``full_batch`` by this rank's part.
        part: The part, set by the surrounding that did so.
        deferred: Store of a surrounding for gradients that the backward leaves for later.
    """

    hook: str
    step: int = 0
    stage: int = 0
    microbatch: int = 0
    full_batch: Any = None
    seed: int | None = None
    splits_backward: bool = False
    shares_stream: bool = field(default=False, init=False)
    batch: Any = field(init=False)
    part: BatchPart | None = None
    deferred: WeightGradients | None = None

    def __post_init__(self) -> None:
        self.batch = self.full_batch

    @property
    def kind(self) -> tuple[str, int]:
        """Return the step and the stage; a first forward of each kind may be watched."""
        return self.hook, self.stage

    @property
    def training(self) -> bool:
        """Return True if a backward follows."""
        return self.hook == "training_step"


class Surrounding:
    """One entry of the list; it overrides the methods that it needs."""

    @property
    def recomputes(self) -> bool:
        """Return True if ``recomputation`` may do something.

        Blocks are not compiled if it does.
        """
        return type(self).recomputation is not Surrounding.recomputation

    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Inspect this rank's part of the LightningModule before the first forward, and hook it.

        Returns:
            A function that undoes it.

        Raises:
            ValueError: The module cannot run in this surrounding.
        """
        return _nothing

    def moved(self, before: Any, after: Any) -> None:
        """Record facts about a batch, given before and after its move to the device."""
        return

    def around(self, forward: Forward) -> Context:
        """Return the context of the user's step."""
        return contextlib.nullcontext()

    def recomputation(self, forward: Forward) -> Contexts | None:
        """Return the contexts of a recomputed part of ``forward`` and of its recomputation.

        The result is None if no contexts are needed.
        """
        return None


class FirstForwards(Surrounding):
    """Entry that acts around the first forward of each kind only."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int]] = set()

    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Make the next forward of each kind the first one."""
        self._seen.clear()
        self._module = module
        return super().attach(module)

    def around(self, forward: Forward) -> Context:
        """Return ``first()`` in the first forward of a kind."""
        if forward.kind in self._seen:
            return contextlib.nullcontext()
        self._seen.add(forward.kind)
        return self.first(self._module)

    def first(self, module: nn.Module) -> Context:
        """Return the context of a first forward of ``module``."""
        return contextlib.nullcontext()


class Surroundings:
    """Ordered list of surroundings.

    Attributes:
        entries: The entries, the outermost first.
    """

    def __init__(self, entries: Iterable[Surrounding] = ()) -> None:
        self.entries = tuple(entries)
        self._running: Forward | None = None

    def __deepcopy__(self, memo: Any) -> Surroundings:
        """Return self: the recomputed copy of a module runs in the surroundings of this rank."""
        return self

    @property
    def recompute(self) -> bool:
        """Return True if a recomputation needs a context at all."""
        return any(entry.recomputes for entry in self.entries)

    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Attach all entries to the module; return a function that undoes it."""
        with contextlib.ExitStack() as undo:
            # Reversed: an outer entry puts its hooks around those of an inner one.
            for entry in reversed(self.entries):
                undo.callback(entry.attach(module))
            return undo.pop_all().close

    def moved(self, before: Any, after: Any) -> None:
        """Call ``moved`` of all entries."""
        for entry in self.entries:
            entry.moved(before, after)

    @contextlib.contextmanager
    def around(self, forward: Forward) -> Iterator[None]:
        """Enter all entries around one forward."""
        try:
            with self._running_in(forward, (entry.around(forward) for entry in self.entries)):
                yield
        except Exception as error:
            error.add_note(
                f"in {forward.hook}, microbatch {forward.microbatch}, stage {forward.stage}"
            )
            raise

    def recomputation(self) -> Contexts:
        """Return the contexts of a part of the running forward, and of its recomputation.

        They are the ``context_fn`` of ``torch.utils.checkpoint.checkpoint``.
        """
        running = self._running
        pairs = [
            pair
            for entry in self.entries
            if running is not None and entry.recomputes
            if (pair := entry.recomputation(running)) is not None
        ]
        if running is None or not pairs:
            return contextlib.nullcontext(), contextlib.nullcontext()
        first, again = zip(*pairs, strict=True)
        return self._running_in(running, first), self._running_in(running, again)

    @contextlib.contextmanager
    def _running_in(self, forward: Forward, contexts: Iterable[Context]) -> Iterator[None]:
        outer = self._running
        self._running = forward
        try:
            with contextlib.ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                yield
        finally:
            self._running = outer


def _nothing() -> None:
    """Undo nothing."""
