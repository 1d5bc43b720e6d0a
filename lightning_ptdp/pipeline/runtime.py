"""The interpreter: executes one rank's actions of a schedule, in order, and knows nothing else about order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_ptdp.pipeline.crossing import Crossing, TensorForm, backward
from lightning_ptdp.pipeline.p2p import Receipt, Transport
from lightning_ptdp.pipeline.progress import Observers, StepObserver
from lightning_ptdp.pipeline.stage import PipelineCut, WholeModel
from lightning_ptdp.schedule.actions import Action, ActionKind, Schedule
from lightning_ptdp.surroundings import Deferred, Forward, Surroundings
from lightning_ptdp.world.mesh import Group

__all__ = ["PipelineRuntime", "StepJob"]


class StepJob(Protocol):
    """What one step of one replica does; the runtime calls it as the schedule says."""

    def begin(self, stage: int, microbatch: int) -> Forward:
        """What is about to run."""

    def signature(self, microbatch: int) -> Hashable:
        """Shapes and dtypes of the microbatch: equal signatures give hidden states of equal shape."""

    def forward(self, forward: Forward) -> Any:
        """Run the user's step on the microbatch."""

    def finish(self, forward: Forward, output: Any) -> Tensor | None:
        """Take the step's output on the last stage; returns the scalar to differentiate when training."""

    def before_last_gradients(self, stage: int, awaited: Sequence[Tensor] | None) -> None:
        """What comes next completes the gradients of ``stage``: a backward (None), or the weight gradients of ``awaited``."""

    def gradient_complete(self, parameter: Tensor) -> None:
        """The gradient of an awaited parameter is complete."""

    def reduce(self, stage: int) -> None:
        """All gradients of ``stage`` are complete."""


class PipelineRuntime:
    """Runs the programs of one pipeline rank.

    Args:
        cut: The local stages.
        transport: Messages to the neighbours; None without a pipeline.
        group: The pipeline group.
        surroundings: What surrounds a forward.
        observer: Is told of every action.
    """

    def __init__(
        self,
        *,
        cut: PipelineCut | WholeModel,
        transport: Transport | None,
        group: Group,
        surroundings: Surroundings | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        self._cut, self._transport, self._rank, self._ranks = cut, transport, group.rank, group.ranks
        self._surroundings = surroundings if surroundings is not None else Surroundings()
        self._observer = observer if observer is not None else Observers()
        self._handlers: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.WEIGHT: self._weight,
            ActionKind.SEND_FORWARD: self._send_forward,
            ActionKind.RECEIVE_FORWARD: self._receive_forward,
            ActionKind.SEND_BACKWARD: self._send_backward,
            ActionKind.RECEIVE_BACKWARD: self._receive_backward,
            ActionKind.REDUCE: self._reduce,
        }
        self._schedule: Schedule | None = None
        self._job: StepJob | None = None
        self._final: frozenset[Action] = frozenset()
        self._clear()

    def run(self, schedule: Schedule, job: StepJob) -> None:
        """Execute this rank's program of ``schedule``; returns when all its messages have left."""
        self._schedule, self._job = schedule, job
        self._final = _final_gradients(schedule.programs[self._rank])
        observer = self._observer
        observer.began(schedule)
        if self._transport is not None:
            self._transport.begin(schedule)
        try:
            for action in schedule.programs[self._rank]:
                observer.started(action)
                self._handlers[action.kind](action)
                observer.finished(action)
            if self._transport is not None:
                self._transport.flush()
            observer.ended()
        finally:
            self._clear()

    def _clear(self) -> None:
        self._schedule, self._job, self._final = None, None, frozenset()
        self._deferred: dict[tuple[int, int], Deferred] = {}
        self._posted: dict[tuple[ActionKind, int, int], Receipt] = {}
        self._handed: dict[tuple[ActionKind, int, int], Crossing] = {}
        self._inputs: dict[tuple[int, int], Crossing | None] = {}
        self._roots: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._sent: dict[tuple[int, int], tuple[TensorForm, ...]] = {}
        self._awaited: list[Action] = []

    def _neighbour(self, stage: int) -> int:
        assert self._schedule is not None
        return self._ranks[self._schedule.rank_of(stage)]

    def _take(self, kind: ActionKind, stage: int, microbatch: int) -> Crossing:
        """What was received for, or handed over locally to, ``stage``."""
        key = (kind, stage, microbatch)
        return self._posted.pop(key).wait() if key in self._posted else self._handed.pop(key)

    def _is_local(self, stage: int) -> bool:
        assert self._schedule is not None
        return self._schedule.rank_of(stage) == self._rank

    def _forward(self, action: Action) -> None:
        job, stage, microbatch = self._job, action.stage, action.microbatch
        assert job is not None and microbatch is not None and self._schedule is not None
        forward, received = job.begin(stage, microbatch), None
        training = forward.training
        forward.splits_backward = training and self._schedule.splits_backward
        if stage:
            received = self._take(ActionKind.RECEIVE_FORWARD, stage, microbatch).entering(training=training)
        with self._surroundings.around(forward):
            result, last = self._cut.run(stage, received, lambda: job.forward(forward), training=training)
        if last:
            loss = job.finish(forward, result)
            roots: tuple[Any, ...] = (loss,) if loss is not None and loss.requires_grad else ()
        else:
            # Of what is sent away only the graph's edges are kept, so that its memory can be freed.
            roots = result.roots() if training else ()
            self._sent[stage, microbatch] = result.awaited
            self._post_awaited()
            kind = ActionKind.RECEIVE_FORWARD if self._is_local(stage + 1) else ActionKind.SEND_FORWARD
            self._handed[kind, stage + (kind is ActionKind.RECEIVE_FORWARD), microbatch] = result
        if training:
            self._inputs[stage, microbatch], self._roots[stage, microbatch] = received, roots
            if forward.deferred is not None:
                self._deferred[stage, microbatch] = forward.deferred

    def _backward(self, action: Action) -> None:
        job, stage, microbatch = self._job, action.stage, action.microbatch
        assert job is not None and microbatch is not None and self._schedule is not None
        last = stage == self._schedule.num_stages - 1
        gradients = None if last else self._take(ActionKind.RECEIVE_BACKWARD, stage, microbatch)
        roots, received = self._roots.pop((stage, microbatch)), self._inputs.pop((stage, microbatch))
        if action in self._final:
            job.before_last_gradients(stage, None)
        deferred = self._deferred.get((stage, microbatch))
        with contextlib.nullcontext() if deferred is None else deferred.collecting((stage, microbatch)):
            if gradients is not None:
                backward(roots, gradients)
            elif roots:
                torch.autograd.backward(roots)
        if received is not None:
            kind = ActionKind.RECEIVE_BACKWARD if self._is_local(stage - 1) else ActionKind.SEND_BACKWARD
            self._handed[kind, stage - (kind is ActionKind.RECEIVE_BACKWARD), microbatch] = received.gradients()

    def _weight(self, action: Action) -> None:
        assert self._job is not None and action.microbatch is not None
        key, job, last = (action.stage, action.microbatch), self._job, action in self._final
        deferred = self._deferred.pop(key, None)
        if last:
            job.before_last_gradients(action.stage, [] if deferred is None else deferred.parameters(key))
        if deferred is not None:
            deferred.run(key, job.gradient_complete if last else None)

    def _send_forward(self, action: Action) -> None:
        assert self._transport is not None and action.microbatch is not None and self._job is not None
        crossing = self._handed.pop((ActionKind.SEND_FORWARD, action.stage, action.microbatch))
        target, what = self._neighbour(action.stage + 1), f"F{action.stage + 1}.{action.microbatch}"
        self._transport.send_forward(what, crossing, target=target, signature=self._job.signature(action.microbatch))

    def _receive_forward(self, action: Action) -> None:
        assert self._transport is not None and action.microbatch is not None and self._job is not None
        source, what = self._neighbour(action.stage - 1), f"F{action.stage}.{action.microbatch}"
        receipt = self._transport.receive_forward(what, source=source, signature=self._job.signature(action.microbatch))
        self._posted[ActionKind.RECEIVE_FORWARD, action.stage, action.microbatch] = receipt

    def _send_backward(self, action: Action) -> None:
        assert self._transport is not None and action.microbatch is not None
        crossing = self._handed.pop((ActionKind.SEND_BACKWARD, action.stage, action.microbatch))
        target, what = self._neighbour(action.stage - 1), f"B{action.stage - 1}.{action.microbatch}"
        self._transport.send_backward(what, crossing, target=target)

    def _receive_backward(self, action: Action) -> None:
        self._awaited.append(action)
        self._post_awaited()

    def _post_awaited(self) -> None:
        """Post the receives of gradients, in the order of the program, as far as their shapes are known.

        A gradient has the shape of the hidden state that was sent. Where a backward directly follows its own forward, the schedule
        asks for the receive before that forward has run.
        """
        assert self._transport is not None or not self._awaited
        while self._awaited and self._transport is not None:
            stage, microbatch = self._awaited[0].stage, self._awaited[0].microbatch
            assert microbatch is not None
            if (stage, microbatch) not in self._sent:
                return
            awaited = self._sent.pop((stage, microbatch))
            source = self._neighbour(stage + 1)
            receipt = self._transport.receive_backward(f"B{stage}.{microbatch}", source=source, awaited=awaited)
            self._posted[ActionKind.RECEIVE_BACKWARD, stage, microbatch] = receipt
            self._awaited.pop(0)

    def _reduce(self, action: Action) -> None:
        assert self._job is not None
        self._job.reduce(action.stage)


def _final_gradients(program: tuple[Action, ...]) -> frozenset[Action]:
    """The last backward or weight gradient of each stage, after which its gradients may be reduced."""
    last = {action.stage: action for action in program if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT)}
    return frozenset(last.values())
