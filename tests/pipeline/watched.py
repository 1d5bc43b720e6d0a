"""One rank of the runtime tests, with observers of the runtime."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ptdp.blocks.recompute import apply_recomputation
from lightning_ptdp.forward.deferred_weight_gradients import WeightGradients
from lightning_ptdp.forward.surroundings import Forward, Surroundings
from lightning_ptdp.pipeline.containers import ModelParts
from lightning_ptdp.pipeline.p2p import Transport
from lightning_ptdp.pipeline.runtime import PipelineRuntime
from lightning_ptdp.pipeline.stage import PipelineCut
from lightning_ptdp.schedule import Schedule
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import Group, ProcessMesh
from tests.pipeline.grid import TIED, Block, Gradients, Microbatch, make_net, uneven_ranges

PARTS = ModelParts(blocks=("blocks",), before=("embedding",), after=("norm", "head"))
Unit = tuple[int, int]
"""(stage, microbatch)."""


class Census:
    """Live activations, by the stage and microbatch that created them."""

    def __init__(self):
        self.unit: Unit = (0, 0)
        self._inside: Counter[Unit] = Counter()
        self._outputs: dict[Unit, int] = {}
        self._numbers = itertools.count()
        self.peak = self.calls = 0

    def note(self, inside: Tensor, output: Tensor) -> None:
        """Register a block's saved activation and its output; the last output is the stage's."""
        unit, number = self.unit, next(self._numbers)
        self._inside[unit] += 1
        self.peak = max(self.peak, sum(count > 0 for count in self._inside.values()))
        self._outputs[unit] = number
        weakref.finalize(inside, self._freed, unit)
        weakref.finalize(output.untyped_storage(), self._left, unit, number)

    def _freed(self, unit: Unit) -> None:
        self._inside[unit] -= 1

    def _left(self, unit: Unit, number: int) -> None:
        if self._outputs.get(unit) == number:
            del self._outputs[unit]

    def outputs(self, stages: set[int]) -> int:
        """Return the number of units of ``stages`` whose output is alive."""
        return sum(stage in stages for stage, _ in self._outputs)


@dataclass
class Outcome:
    """Observations of one rank in one step.

    They hold no autograd graphs, so that they can be sent to the test.

    Attributes:
        computed: Forward actions in the order in which they ran; with a split backward also
            backward and weight actions.
        losses: By microbatch, on the last stage's rank.
        gradients: By name, after the step.
        remaining: By stage, the gradients added after ``before_gradients`` of the last microbatch,
            and the names of the parameters that it awaited.
        told: Calls of the job in order, as "last" or "reduce" with a stage.
        completed: Parameters reported as complete, in order.
        late: Parameters whose gradient changed after they were reported as complete, or after their
            stage was reduced.
        kept: By stage, the parameters that its first weight action found without a gradient, and
            with one.
        held: The largest number of units with live activations.
        calls: Calls of the core of blocks, including recomputations.
        unsent: The largest number of outputs that were alive after they should have been sent.
    """

    computed: list[str] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    gradients: Gradients = field(default_factory=dict)
    remaining: dict[int, tuple[Gradients, list[str] | None]] = field(default_factory=dict)
    told: list[tuple[str, int]] = field(default_factory=list)
    completed: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    kept: dict[int, tuple[list[str], list[str]]] = field(default_factory=dict)
    held: int = 0
    calls: int = 0
    unsent: int = 0


class WatchedStore(WeightGradients):
    """Records the halves of a backward, and the gradients present before the second half."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names, self.outcome = names, Outcome()

    def collecting(self, key: Hashable) -> Any:
        self.outcome.computed.append("B{}.{}".format(*key))
        return super().collecting(key)

    def run(self, key: Hashable, done: Any = None) -> None:
        stage = key[0]
        self.outcome.computed.append("W{}.{}".format(*key))
        if stage not in self.outcome.kept:
            found: tuple[list[str], list[str]] = ([], [])
            for parameter in self.parameters(key):
                found[parameter.grad is not None].append(self.names[id(parameter)])
            self.outcome.kept[stage] = found
        super().run(key, done)


class WatchedTransport(Transport):
    """Transport that counts headers; with ``rendezvous``, a send blocks until it is received."""

    rendezvous = False
    headers = 0

    def send_forward(self, what: str, crossing: Any, **where: Any) -> None:
        super().send_forward(what, crossing, **where)
        if self.rendezvous:
            self.flush()

    def send_backward(self, what: str, gradient: Any, **where: Any) -> None:
        super().send_backward(what, gradient, **where)
        if self.rendezvous:
            self.flush()

    def irecv(self, buffer: Tensor, *where: Any) -> Any:
        self.headers += buffer.dtype is torch.int64
        return super().irecv(buffer, *where)


class WatchedJob:
    """One step of the net on each microbatch, recorded in an ``Outcome``."""

    def __init__(
        self,
        rank: Rank,
        schedule: Schedule,
        batch: Sequence[Microbatch],
        *,
        training: bool,
        outcome: Outcome,
    ) -> None:
        self.training, self._rank, self._batch, self.outcome = training, rank, batch, outcome
        leaves = [
            s
            for s in range(schedule.num_stages - 1)
            if schedule.rank_of(s) != schedule.rank_of(s + 1)
        ]
        self._sends, self._splits = set(leaves), schedule.splits_backward
        self._at: list[tuple[str, Tensor | None]] = []
        self._before: dict[int, tuple[dict[str, Tensor | None], list[str] | None]] = {}

    def signature(self, microbatch: int) -> Hashable:
        return self.training, tuple(self._batch[microbatch].ids.shape)

    def begin(self, stage: int, microbatch: int) -> Forward:
        hook = "training_step" if self.training else "validation_step"
        return Forward(
            hook=hook, stage=stage, microbatch=microbatch, full_batch=self._batch[microbatch]
        )

    def forward(self, forward: Forward) -> Tensor:
        self._look()
        self._rank.census.unit = forward.stage, forward.microbatch
        self.outcome.computed.append(f"F{forward.stage}.{forward.microbatch}")
        return self._rank.net(forward.batch.ids, forward.batch.labels)

    def finish(self, forward: Forward, output: Tensor) -> Tensor | None:
        self.outcome.losses[forward.microbatch] = output.item()
        return output * forward.full_batch.share if self.training else None

    def before_gradients(self, stage: int, awaited: Sequence[Tensor] | None, *, last: bool) -> None:
        self._look()
        self._last = last
        if not last:
            return
        self.outcome.told.append(("last", stage))
        names = (
            None if awaited is None else [self._rank.names[id(parameter)] for parameter in awaited]
        )
        self._before[stage] = {name: _copied(p) for name, p in self._rank.parameters(stage)}, names

    def gradient_complete(self, parameter: Tensor) -> None:
        if not self._last:
            return
        name = self._rank.names[id(parameter)]
        self.outcome.completed.append(name)
        if name not in TIED.values():
            self._at.append((name, _copied(parameter)))

    def reduce(self, stage: int, *, last: bool) -> None:
        self._look()
        if not last:
            return
        self.outcome.told.append(("reduce", stage))
        self._at += [(name, _copied(parameter)) for name, parameter in self._rank.parameters(stage)]

    def close(self) -> Outcome:
        """Complete the outcome after the step and return it."""
        self._look()
        self.outcome.held, self.outcome.calls = self._rank.census.peak, self._rank.census.calls
        final = {self._rank.names[id(p)]: p.grad for p in self._rank.net.parameters()}
        self.outcome.gradients = {
            name: grad.clone() for name, grad in final.items() if grad is not None
        }
        self.outcome.late = sorted(
            {name for name, copy in self._at if not _same(copy, final[name])}
        )
        for stage, (before, awaited) in self._before.items():
            self.outcome.remaining[stage] = (
                {n: _minus(final[n], copy) for n, copy in before.items()},
                awaited,
            )
        return self.outcome

    def _look(self) -> None:
        self.outcome.unsent = max(self.outcome.unsent, self._rank.census.outputs(self._sends))


def _copied(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else parameter.grad.clone()


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right if left is None or right is None else torch.equal(left, right)


def _minus(left: Tensor | None, right: Tensor | None) -> Tensor:
    return left.clone() if right is None else left - right


class Rank:
    """This rank's part of the net and its runtime; construction is collective.

    Args:
        schedule: Schedule that determines the placement of the stages.
        dtype: Dtype of the net.
        recompute: Policy of ``apply_recomputation``.
    """

    def __init__(
        self, schedule: Schedule, *, dtype: torch.dtype = torch.float64, recompute: str = "none"
    ) -> None:
        p, self.rank = (
            schedule.pipeline_parallel_size,
            dist.get_rank() if dist.is_initialized() else 0,
        )
        self.net, self.census = make_net(schedule.num_stages, dtype), Census()
        self.cut: PipelineCut | None = None
        self.transport: WatchedTransport | None = None
        ranges = uneven_ranges(schedule.num_stages)
        if p > 1:
            self.cut = PipelineCut(
                self.net, parts=PARTS, ranges=ranges, stages=schedule.stages_of(self.rank)
            )
            layout = ParallelLayout(
                world_size=p,
                pipeline_parallel_size=p,
                virtual_pipeline_size=schedule.virtual_pipeline_size,
                placement=schedule.placement,
            )
            mesh = ProcessMesh.create(layout=layout, rank=self.rank)
            self.transport = WatchedTransport(mesh=mesh, device=torch.device("cpu"))
        self.names = {id(p): TIED.get(name, name) for name, p in self.net.named_parameters()}
        self.store = WatchedStore(self.names)
        surroundings = Surroundings([self.store])
        apply_recomputation(
            self.net,
            policy=recompute,
            blocks="blocks",
            ranges=ranges,
            selective=("blocks.*.core",),
            surroundings=surroundings,
        )
        for block in self.net.blocks:
            if isinstance(block, Block):
                block.core.census = self.census
        self.runtime = PipelineRuntime(
            cut=self.cut,
            transport=self.transport,
            group=Group(ranks=tuple(range(p)), rank=self.rank),
            surroundings=surroundings,
        )

    def parameters(self, stage: int) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that belong to ``stage`` alone."""
        for name, parameter in self.net.named_parameters():
            module = name.rpartition(".")[0]
            owner = self.cut.module_stages[module] if self.cut is not None else 0
            if owner == stage and TIED.get(name, name) not in TIED.values():
                yield name, parameter

    def step(
        self, schedule: Schedule, batch: Sequence[Microbatch], *, training: bool = True
    ) -> Outcome:
        """Run ``schedule`` on ``batch``; accumulate gradients."""
        outcome = self.store.outcome = Outcome()
        self.census.peak = self.census.calls = 0
        job = WatchedJob(self, schedule, batch, training=training, outcome=outcome)
        with torch.set_grad_enabled(training):
            self.runtime.run(schedule, job)
        return job.close()

    def rendezvous(self, on: bool) -> None:
        """Make every send block until its message is received, if ``on``."""
        if self.transport is not None:
            self.transport.rendezvous = on


def assert_same(
    found: dict[str, Tensor], expected: dict[str, Tensor], where: str, tolerance: float = 1e-12
) -> None:
    assert found.keys() == expected.keys(), where
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, n=name: f"{where}, {n}: {text}",
        )


def summed(outcomes: list[Outcome]) -> dict[str, Tensor]:
    """Return the gradients of the whole model, summed over the ranks that hold a tied weight."""
    total: dict[str, Tensor] = {}
    for outcome in outcomes:
        for name, gradient in outcome.gradients.items():
            assert name not in total or name in TIED.values(), f"{name} is on two ranks"
            total[name] = total.get(name, 0) + gradient
    return total
