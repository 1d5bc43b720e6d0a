"""The interpreter: executes one rank's actions of a schedule, in order, and knows nothing else about order."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_ptdp.pipeline.actions import Action, ActionKind, Schedule
from lightning_ptdp.pipeline.p2p import Receipt, Transport
from lightning_ptdp.pipeline.stage import Crossing, PipelineCut, WholeModel

__all__ = ["PipelineRuntime", "StepJob"]


class StepJob(Protocol):
    """What one step of one replica does; the runtime calls it as the schedule says."""

    training: bool

    def signature(self, microbatch: int) -> Hashable:
        """Shapes and dtypes of the microbatch: equal signatures give hidden states of equal shape."""

    def forward(self, stage: int, microbatch: int) -> Any:
        """Run the user's step on the microbatch."""

    def finish(self, microbatch: int, output: Any) -> Tensor | None:
        """Take the step's output on the last stage; returns the scalar to differentiate when training."""

    def before_last_backward(self, stage: int) -> None:
        """The next backward of ``stage`` completes its gradients."""

    def reduce(self, stage: int) -> None:
        """All gradients of ``stage`` are complete."""


class PipelineRuntime:
    """Runs the programs of one pipeline rank.

    Args:
        cut: The local stages.
        transport: Messages to the neighbours; None without a pipeline.
        rank: Pipeline rank (not the global one).
        ranks: Global ranks of the pipeline.
    """

    def __init__(self, *, cut: PipelineCut | WholeModel, transport: Transport | None, rank: int, ranks: tuple[int, ...]) -> None:
        self._cut, self._transport, self._rank, self._ranks = cut, transport, rank, ranks
        self._handlers: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
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
        self._final = _final_backwards(schedule.programs[self._rank])
        try:
            for action in schedule.programs[self._rank]:
                self._handlers[action.kind](action)
            if self._transport is not None:
                self._transport.flush()
        finally:
            self._clear()

    def _clear(self) -> None:
        self._schedule, self._job, self._final = None, None, frozenset()
        self._posted: dict[tuple[ActionKind, int, int], Receipt] = {}
        self._handed: dict[tuple[ActionKind, int, int], Crossing] = {}
        self._inputs: dict[tuple[int, int], Tensor | None] = {}
        self._roots: dict[tuple[int, int], Any] = {}
        self._sent: dict[tuple[int, int], tuple[tuple[int, ...], torch.dtype]] = {}
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
        assert job is not None and microbatch is not None
        received = self._take(ActionKind.RECEIVE_FORWARD, stage, microbatch) if stage else None
        if received is not None and job.training and received.tensor.is_floating_point():
            received = Crossing(received.tensor.detach().requires_grad_(), received.wrap)
        result, last = self._cut.run(stage, received, lambda: job.forward(stage, microbatch), training=job.training)
        root = job.finish(microbatch, result) if last else result.tensor
        if not last:
            self._sent[stage, microbatch] = (tuple(result.tensor.shape), result.tensor.dtype)
            self._post_awaited()
            kind = ActionKind.RECEIVE_FORWARD if self._is_local(stage + 1) else ActionKind.SEND_FORWARD
            self._handed[kind, stage + (kind is ActionKind.RECEIVE_FORWARD), microbatch] = result
        if job.training:
            self._inputs[stage, microbatch] = received.tensor if received is not None else None
            self._roots[stage, microbatch] = _root(root, last)

    def _backward(self, action: Action) -> None:
        job, stage, microbatch = self._job, action.stage, action.microbatch
        assert job is not None and microbatch is not None and self._schedule is not None
        last = stage == self._schedule.num_stages - 1
        gradient = None if last else self._take(ActionKind.RECEIVE_BACKWARD, stage, microbatch).tensor
        root, received = self._roots.pop((stage, microbatch)), self._inputs.pop((stage, microbatch))
        if action in self._final:
            job.before_last_backward(stage)
        if root is not None:
            torch.autograd.backward(root, gradient)
        if received is not None:
            value = received.grad if received.grad is not None else torch.zeros_like(received)
            kind = ActionKind.RECEIVE_BACKWARD if self._is_local(stage - 1) else ActionKind.SEND_BACKWARD
            self._handed[kind, stage - (kind is ActionKind.RECEIVE_BACKWARD), microbatch] = Crossing(value)

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
        self._transport.send_backward(what, crossing.tensor, target=target)

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
            shape, dtype = self._sent.pop((stage, microbatch))
            receipt = self._transport.receive_backward(
                f"B{stage}.{microbatch}", source=self._neighbour(stage + 1), shape=shape, dtype=dtype
            )
            self._posted[ActionKind.RECEIVE_BACKWARD, stage, microbatch] = receipt
            self._awaited.pop(0)

    def _reduce(self, action: Action) -> None:
        assert self._job is not None
        self._job.reduce(action.stage)


def _root(output: Tensor | None, last: bool) -> Any:
    """Where the backward starts. Of an output that is sent away only the graph's edge is kept, so that its memory can be freed."""
    if output is None or not output.requires_grad:
        return None
    return output if last else torch.autograd.graph.get_gradient_edge(output)


def _final_backwards(program: tuple[Action, ...]) -> frozenset[Action]:
    """The last backward of each stage, after which its gradients may be reduced."""
    last = {action.stage: action for action in program if action.kind is ActionKind.BACKWARD}
    return frozenset(last.values())
