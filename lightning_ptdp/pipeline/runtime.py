"""Runtime: executes one rank's actions of a schedule, in order.

It has no knowledge of the order beyond that list.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from lightning_ptdp.forward.deferred_weight_gradients import WeightGradients
from lightning_ptdp.forward.surroundings import Forward, Surroundings
from lightning_ptdp.pipeline.crossing import Crossing, Roots, TensorForm, backward
from lightning_ptdp.pipeline.p2p import Receipt, Transport
from lightning_ptdp.pipeline.program_observers import Observers, StepObserver
from lightning_ptdp.pipeline.stage import PipelineCut
from lightning_ptdp.schedule.actions import MESSAGES, Action, ActionKind, Schedule
from lightning_ptdp.world.mesh import Group


class StepJob(ABC):
    """Work of one step of one replica; the runtime calls it in the order of the schedule.

    A subclass without gradients leaves the methods about them out.
    """

    @abstractmethod
    def begin(self, stage: int, microbatch: int) -> Forward:
        """Prepare for the next forward."""

    @abstractmethod
    def signature(self, microbatch: int) -> Hashable:
        """Return the shapes and dtypes of the microbatch.

        Equal signatures give hidden states of equal shape.
        """

    @abstractmethod
    def forward(self, forward: Forward) -> object:
        """Run the user's step on the microbatch."""

    @abstractmethod
    def finish(self, forward: Forward, output: Any) -> Tensor | None:
        """Take the step's output on the last stage.

        In training, return the scalar to differentiate.
        """

    def before_gradients(self, stage: int, awaited: Sequence[Tensor] | None, *, last: bool) -> None:
        """Prepare for the action that completes a microbatch's gradients of ``stage``.

        The action is a backward (None), or the weight gradients of ``awaited``. With ``last`` it
        is that of the step's last microbatch.
        """
        return

    def gradient_complete(self, parameter: Tensor) -> None:
        """Handle the completion of the gradient of an awaited parameter."""
        return

    def reduce(self, stage: int, *, last: bool) -> None:
        """Reduce the gradients of ``stage``, which one or several microbatches have completed."""
        return

    def gather(self, stage: int) -> None:
        """Start to gather the sharded parameters of ``stage``."""
        return

    def free(self, stage: int) -> None:
        """Free the other replicas' parts of the parameters of ``stage``."""
        return


@dataclass(kw_only=True)
class PipelineRuntime:
    """Executes the programs of one pipeline rank.

    Attributes:
        cut: The local stages; None: the whole model is the one stage.
        transport: Messages to the neighbours; None without a pipeline.
        group: The pipeline group.
        surroundings: Context managers around a forward.
        observer: Receives an event for every action.
        adds_consecutive: Gradients of microbatches of a stage that follow each other on this rank
            are reduced together, after the last of them.
    """

    cut: PipelineCut | None
    transport: Transport | None
    group: Group
    surroundings: Surroundings = field(default_factory=Surroundings)
    observer: StepObserver = field(default_factory=Observers)
    adds_consecutive: bool = False

    def run(self, schedule: Schedule, job: StepJob) -> None:
        """Execute this rank's program of ``schedule``; return when all its messages have left."""
        program = schedule.programs[self.group.rank]
        observer = self.observer
        transport = self.transport
        reductions = _reductions(program, adds_consecutive=self.adds_consecutive)
        handlers = _Step(self, schedule, job, reductions).handlers()
        observer.began(schedule)
        if transport is not None:
            transport.begin(schedule)
        for action in program:
            observer.started(action)
            handlers[action.kind](action.stage, action.microbatch or 0)
            observer.finished(action)
        if transport is not None:
            transport.flush()
        observer.ended()


_Key = tuple[int, int]
"""(stage, microbatch)"""
_Reductions = dict[tuple[ActionKind, int, int | None], bool]
"""Actions before which nothing more is added to a stage's gradients: (kind, stage, microbatch)."""


@dataclass(eq=False)
class _Step:
    """State of a running program, shared by its actions.

    Attributes:
        reductions: Result of ``_reductions``.
        posted: Posted receives, by the action that requested them.
        handed: Results, by the send that will take them, or, if the next stage is on the same rank,
            by the receive that would otherwise take them.
        sent: Forms of the gradients that come back for each forward.
    """

    runtime: PipelineRuntime
    schedule: Schedule
    job: StepJob
    reductions: _Reductions
    posted: dict[tuple[ActionKind, int, int], Receipt] = field(default_factory=dict)
    handed: dict[tuple[ActionKind, int, int], Crossing] = field(default_factory=dict)
    inputs: dict[_Key, Crossing | None] = field(default_factory=dict)
    roots: dict[_Key, Roots] = field(default_factory=dict)
    deferred: dict[_Key, WeightGradients] = field(default_factory=dict)
    sent: dict[_Key, tuple[TensorForm, ...]] = field(default_factory=dict)

    def handlers(self) -> dict[ActionKind, Callable[[int, int], None]]:
        """Return the functions that run an action, called with its stage and microbatch."""
        return {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.WEIGHT: self._weight,
            ActionKind.SEND_FORWARD: self._send_forward,
            ActionKind.RECEIVE_FORWARD: self._receive_forward,
            ActionKind.SEND_BACKWARD: self._send_backward,
            ActionKind.RECEIVE_BACKWARD: self._receive_backward,
            ActionKind.REDUCE: lambda stage, _: self.job.reduce(stage, last=True),
            ActionKind.GATHER: lambda stage, _: self.job.gather(stage),
            ActionKind.FREE: lambda stage, _: self.job.free(stage),
        }

    @property
    def _transport(self) -> Transport:
        assert self.runtime.transport is not None
        return self.runtime.transport

    def _rank_of(self, stage: int) -> int:
        """Return the global rank of ``stage``."""
        return self.runtime.group.ranks[self.schedule.rank_of(stage)]

    def _take(self, kind: ActionKind, stage: int, microbatch: int) -> Crossing:
        """Return the crossing that was received for ``stage``, or handed over locally."""
        key = (kind, stage, microbatch)
        return self.posted.pop(key).wait() if key in self.posted else self.handed.pop(key)

    def _hand(self, kind: ActionKind, stage: int, microbatch: int, result: Crossing) -> None:
        """Keep the result of a computation for its send, or for the next stage if it is local."""
        message = MESSAGES[kind]
        target = stage + message.step
        is_local = self.schedule.rank_of(target) == self.runtime.group.rank
        self.handed[
            (message.receive, target, microbatch) if is_local else (message.send, stage, microbatch)
        ] = result

    def _forward(self, stage: int, microbatch: int) -> None:
        job = self.job
        key = (stage, microbatch)
        received = None
        forward = job.begin(stage, microbatch)
        training = forward.training
        forward.splits_backward = training and self.schedule.splits_backward
        if stage:
            received = self._take(ActionKind.RECEIVE_FORWARD, stage, microbatch).entering(
                training=training
            )
        with self.runtime.surroundings.around(forward):
            step = partial(job.forward, forward)
            cut = self.runtime.cut
            result: Any = (
                step() if cut is None else cut.run(stage, received, step, training=training)
            )
        roots: Roots
        if stage == self.schedule.num_stages - 1:
            loss = job.finish(forward, result)
            roots = (loss,) if loss is not None and loss.requires_grad else ()
        else:
            # Keep only the graph's edges of a sent crossing, so that its memory can be freed.
            roots = result.roots() if training else ()
            self.sent[key] = result.awaited
            self._hand(ActionKind.FORWARD, stage, microbatch, result)
        if training:
            self.inputs[key] = received
            self.roots[key] = roots
            if forward.deferred is not None:
                self.deferred[key] = forward.deferred

    def _backward(self, stage: int, microbatch: int) -> None:
        key = (stage, microbatch)
        last = stage == self.schedule.num_stages - 1
        gradients = None if last else self._take(ActionKind.RECEIVE_BACKWARD, stage, microbatch)
        roots = self.roots.pop(key)
        received = self.inputs.pop(key)
        deferred = self.deferred.get(key)
        final = self.reductions.get((ActionKind.BACKWARD, stage, microbatch))
        completes = final or (final is not None and deferred is None)
        if completes:
            self.job.before_gradients(stage, None, last=bool(final))
        with contextlib.nullcontext() if deferred is None else deferred.collecting(key):
            backward(roots, gradients)
        if completes and not final:
            self.job.reduce(stage, last=False)
        if received is not None:
            self._hand(ActionKind.BACKWARD, stage, microbatch, received.gradients())

    def _weight(self, stage: int, microbatch: int) -> None:
        key = (stage, microbatch)
        job = self.job
        deferred = self.deferred.pop(key, None)
        final = self.reductions.get((ActionKind.WEIGHT, stage, microbatch))
        completes = final or (final is not None and deferred is not None)
        if completes:
            awaited = [] if deferred is None else deferred.parameters(key)
            job.before_gradients(stage, awaited, last=bool(final))
        if deferred is not None:
            deferred.run(key, job.gradient_complete)
        if completes and not final:
            job.reduce(stage, last=False)

    def _send_forward(self, stage: int, microbatch: int) -> None:
        crossing = self.handed.pop((ActionKind.SEND_FORWARD, stage, microbatch))
        self._transport.send_forward(
            f"F{stage + 1}.{microbatch}",
            crossing,
            target=self._rank_of(stage + 1),
            signature=self.job.signature(microbatch),
        )

    def _receive_forward(self, stage: int, microbatch: int) -> None:
        self.posted[ActionKind.RECEIVE_FORWARD, stage, microbatch] = (
            self._transport.receive_forward(
                f"F{stage}.{microbatch}",
                source=self._rank_of(stage - 1),
                signature=self.job.signature(microbatch),
            )
        )

    def _send_backward(self, stage: int, microbatch: int) -> None:
        crossing = self.handed.pop((ActionKind.SEND_BACKWARD, stage, microbatch))
        self._transport.send_backward(
            f"B{stage - 1}.{microbatch}", crossing, target=self._rank_of(stage - 1)
        )

    def _receive_backward(self, stage: int, microbatch: int) -> None:
        # A gradient has the shape of the hidden state that was sent. Its receive is not posted
        # before the stage's own forward (lowering.py).
        self.posted[ActionKind.RECEIVE_BACKWARD, stage, microbatch] = (
            self._transport.receive_backward(
                f"B{stage}.{microbatch}",
                source=self._rank_of(stage + 1),
                awaited=self.sent.pop((stage, microbatch)),
            )
        )


def _reductions(program: Sequence[Action], *, adds_consecutive: bool) -> _Reductions:
    """Return the backwards and weight gradients whose stage's gradients may be reduced afterwards.

    The value is True for the last one of each stage.

    Args:
        program: Actions of one rank.
        adds_consecutive: Leave out those that others of the same stage follow directly: these add
            to the gradients first.
    """
    weights = ActionKind.WEIGHT
    gradients = [action for action in program if action.kind in (ActionKind.BACKWARD, weights)]
    split = {(action.stage, action.microbatch) for action in gradients if action.kind is weights}
    completing = [
        action
        for action in gradients
        if action.kind is weights or (action.stage, action.microbatch) not in split
    ]
    last = {action.stage: action for action in completing}
    added = {
        action
        for action, following in pairwise(completing)
        if adds_consecutive and action.stage == following.stage
    }
    return {
        (action.kind, action.stage, action.microbatch): action is last[action.stage]
        for action in gradients
        if action not in added
    }
