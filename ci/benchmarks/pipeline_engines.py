"""The same stack of blocks under our pipeline runtime and under ``torch.distributed.pipelining``,
without a Trainer; and their floor."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from sleeping import SleepingBlock
from torch import Tensor, nn
from torch.distributed import pipelining

from lightning_ptdp.forward.deferred_weight_gradients import WeightGradients
from lightning_ptdp.forward.surroundings import Forward, Surroundings
from lightning_ptdp.pipeline.containers import ModelParts
from lightning_ptdp.pipeline.p2p import Transport
from lightning_ptdp.pipeline.runtime import PipelineRuntime
from lightning_ptdp.pipeline.stage import PipelineCut
from lightning_ptdp.schedule import Action, ActionKind, Costs, Schedule, build_schedule, simulate
from lightning_ptdp.schedule.lowering import lower
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh

__all__ = ["PEERS", "Bare", "Job", "Ours", "Sizes", "Stack", "Torchs", "ideal", "torchs_schedule"]

PEERS = {
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zb_h1": "ScheduleInterleavedZeroBubble",  # with one stage a rank: ZB1P, which is ZB-H1
    "zb_v": "ScheduleZBVZeroBubble",
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A schedule and its sizes.

    Attributes:
        schedule: Our name of it.
        p: Pipeline ranks.
        v: Stages a rank.
        m: Microbatches.
    """

    schedule: str
    p: int
    v: int
    m: int

    def build(self) -> Schedule:
        """Our schedule."""
        return build_schedule(
            self.schedule,
            pipeline_parallel_size=self.p,
            virtual_pipeline_size=self.v,
            num_microbatches=self.m,
        )

    def __str__(self) -> str:
        return (
            f"{self.schedule} p={self.p}" + (f" v={self.v}" if self.v > 1 else "") + f" m={self.m}"
        )


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(output: Tensor, _target: Tensor | None = None) -> Tensor:
    return output.mean()


class Job:
    """A step: the stack on every microbatch, the sum of their losses."""

    def __init__(self, stack: Stack, microbatches: Sequence[Tensor]) -> None:
        self._stack, self._microbatches = stack, microbatches

    def signature(self, microbatch: int) -> Hashable:
        return tuple(self._microbatches[microbatch].shape)

    def begin(self, stage: int, microbatch: int) -> Forward:
        return Forward(
            hook="training_step",
            stage=stage,
            microbatch=microbatch,
            full_batch=self._microbatches[microbatch],
        )

    def forward(self, forward: Forward) -> Tensor:
        return self._stack(forward.batch)

    def finish(self, forward: Forward, output: Tensor) -> Tensor:
        return loss_of(output)

    def before_gradients(self, stage: int, awaited: Sequence[Tensor] | None, *, last: bool) -> None:
        """There are no replicas."""

    def gradient_complete(self, parameter: Tensor) -> None:
        """There are no replicas."""

    def reduce(self, stage: int, *, last: bool) -> None:
        """There are no replicas."""


class Ours:
    """Our runtime; collective to make.

    Args:
        sizes: Of the schedule.
        blocks: All of the model's, the same number a stage.
        batch: (m b, ...), all microbatches.
    """

    def __init__(self, sizes: Sizes, blocks: Sequence[nn.Module], batch: Tensor) -> None:
        rank, self.schedule = dist.get_rank(), sizes.build()
        layout = ParallelLayout(
            world_size=sizes.p,
            pipeline_parallel_size=sizes.p,
            virtual_pipeline_size=sizes.v,
            placement=self.schedule.placement,
        )
        stack, surroundings = Stack(blocks), Surroundings([WeightGradients()])
        surroundings.attach(stack)
        cut = PipelineCut(
            stack,
            parts=ModelParts(blocks=("blocks",)),
            ranges=_ranges(len(blocks), sizes.p * sizes.v),
            stages=self.schedule.stages_of(rank),
        )
        self.mesh = ProcessMesh.create(layout=layout, rank=rank)
        self.transport = Transport(mesh=self.mesh, device=batch.device)
        self.parameters = list(stack.parameters())
        self._job = Job(stack, batch.chunk(sizes.m))
        self._runtime = PipelineRuntime(
            cut=cut,
            transport=self.transport,
            group=self.mesh.group("pipeline"),
            surroundings=surroundings,
        )

    def step(self) -> None:
        """All forwards and backwards of a step."""
        for parameter in self.parameters:
            parameter.grad = None
        self._runtime.run(self.schedule, self._job)


class Bare:
    """The floor: the actions of our program as a bare loop that sleeps and sends tensors over gloo.
    No module, no autograd.

    Args:
        ours: Its schedule and communicators are used.
        costs: How long to sleep, in seconds.
        example: A hidden state.
    """

    def __init__(self, ours: Ours, costs: Costs, example: Tensor) -> None:
        self._schedule, self._mesh, self._example = ours.schedule, ours.mesh, example
        self._seconds = {
            ActionKind.FORWARD: costs.forward,
            ActionKind.BACKWARD: costs.backward,
            ActionKind.WEIGHT: costs.weight,
        }

    def step(self) -> None:
        """All sleeps and messages of a step."""
        posted: dict[tuple[ActionKind, int, int | None], Any] = {}
        sent = []
        for action in self._schedule.programs[self._mesh.rank]:
            if action.kind in self._seconds:
                work = posted.pop((action.kind, action.stage, action.microbatch), None)
                if work is not None:
                    work.wait()
                time.sleep(self._seconds[action.kind])
            elif action.kind is not ActionKind.REDUCE:
                channel = self._schedule.channel(action)
                group, buffer = self._mesh.channels[channel], torch.empty_like(self._example)
                if action.kind in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD):
                    sent.append((dist.isend(buffer, channel.destination, group=group), buffer))
                else:
                    use = (
                        ActionKind.FORWARD
                        if action.kind is ActionKind.RECEIVE_FORWARD
                        else ActionKind.BACKWARD
                    )
                    posted[use, action.stage, action.microbatch] = dist.irecv(
                        buffer, channel.source, group=group
                    )
        for work, _ in sent:
            work.wait()


class Torchs:
    """``torch.distributed.pipelining``; arguments as for ``Ours``.

    Where the schedule splits the backward, sleeping blocks get a ``dw_builder``, torch's hook for
    weight gradients of one's own; other blocks are left to its walk over the autograd graph, as its
    users leave them."""

    def __init__(self, sizes: Sizes, blocks: Sequence[nn.Module], batch: Tensor) -> None:
        rank, schedule = dist.get_rank(), sizes.build()
        ranges, example = _ranges(len(blocks), schedule.num_stages), batch.chunk(sizes.m)[0]
        hidden = torch.empty_like(example, requires_grad=True)
        self.stages = []
        for index in schedule.stages_of(rank):
            module = nn.Sequential(*blocks[slice(*ranges[index])])
            self.stages.append(
                pipelining.PipelineStage(
                    module,
                    index,
                    schedule.num_stages,
                    batch.device,
                    input_args=hidden if index else example,
                    output_args=hidden,
                    dw_builder=_dw_builder(module) if schedule.splits_backward else None,
                )
            )
        kind = getattr(pipelining, PEERS[sizes.schedule])
        stages = self.stages[0] if kind is pipelining.Schedule1F1B else self.stages
        self.schedule = kind(stages, sizes.m, loss_fn=loss_of, scale_grads=False)
        self.parameters = [
            parameter for stage in self.stages for parameter in stage.submod.parameters()
        ]
        self._arguments = (batch,) if self.stages[0].is_first else ()
        self._target = batch if any(stage.is_last for stage in self.stages) else None

    def step(self) -> None:
        """All forwards and backwards of a step."""
        for parameter in self.parameters:
            parameter.grad = None
        self.schedule.step(*self._arguments, target=self._target, return_outputs=False)

    @property
    def held_receive_bytes(self) -> int:
        """Receive buffers that the stages keep between steps (the older versions of torch make all
        of them at once)."""
        infos = [
            info
            for stage in self.stages
            for kept in (stage.args_recv_info, stage.grad_recv_info)
            for info in kept.values()
        ]
        buffers = [getattr(info, "buffer", None) for row in infos for info in row]
        return sum(buffer.nbytes for buffer in buffers if isinstance(buffer, Tensor))


def _dw_builder(module: nn.Sequential) -> Callable[[], Callable[[], None]] | None:
    sleeping = [block for block in module if isinstance(block, SleepingBlock)]
    if not sleeping:
        return None

    def run() -> None:
        for block in sleeping:
            block.add_weight_gradient()

    return lambda: run


def _ranges(layers: int, stages: int) -> list[tuple[int, int]]:
    each = layers // stages
    return [(stage * each, (stage + 1) * each) for stage in range(stages)]


# ---- the ideal -----------------------------------------------------------------------------------


def ideal(schedule: Schedule, costs: Costs) -> float:
    """Seconds that a step takes if messages and the engine cost nothing."""
    return float(simulate(schedule, costs).step_time)


_PRINTED = re.compile(r"(\d+)(F|B|I|W)(\d+)")
_KINDS = {
    "F": (ActionKind.FORWARD,),
    "B": (ActionKind.BACKWARD,),
    "I": (ActionKind.BACKWARD,),
    "W": (ActionKind.WEIGHT,),
}


def torchs_schedule(schedule: Any, ours: Schedule) -> Schedule:
    """The order in which torch computes, as a schedule of ours, so that it has an ideal of its own.

    Its printed actions are read: ``3F1`` is the forward of microbatch 1 on stage 3, ``B`` a whole
    backward, ``I`` and ``W`` its halves. Its 1F1B is no list of actions but a loop with ours'
    order."""
    if not hasattr(schedule, "pipeline_order_with_comms"):
        return ours
    order, programs = schedule.pipeline_order_with_comms, []
    for rank in sorted(order):
        found = [_PRINTED.fullmatch(str(action)) for action in order[rank] if action is not None]
        actions = [match.groups() for match in found if match is not None]
        whole = (
            (ActionKind.BACKWARD, ActionKind.WEIGHT)
            if ours.splits_backward
            else (ActionKind.BACKWARD,)
        )
        kinds = _KINDS | {"B": whole}
        programs.append(
            tuple(
                Action(kind, int(s), int(mb)) for s, letter, mb in actions for kind in kinds[letter]
            )
        )
    sizes = ours.pipeline_parallel_size, ours.virtual_pipeline_size, ours.num_microbatches
    return lower(Schedule(f"torch {ours.name}", *sizes, tuple(programs), ours.placement))
