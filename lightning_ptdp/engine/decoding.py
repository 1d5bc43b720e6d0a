"""One forward of the whole model outside of the user's steps, for next tokens or scores.

It runs through all stages, and all ranks receive the result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.forward.surroundings import Context, Forward, Surroundings
from lightning_ptdp.pipeline.runtime import PipelineRuntime, StepJob
from lightning_ptdp.schedule.actions import Schedule
from lightning_ptdp.tensor_parallel import gather_full
from lightning_ptdp.world.mesh import ProcessMesh


@dataclass(kw_only=True, eq=False)
class Decoding(StepJob):
    """A forward without gradients, whose parameters are gathered when they are read.

    Attributes:
        call: Runs the model as a stage; on the last stage it returns the logits (b, V), or scores.
        choose: Maps the whole output of ``call`` to the result, such as tokens (b) int64.
        key: Forwards with the same key have hidden states of the same shape.
        context: Context around the model.
        dtype: Type of the result.
    """

    call: Callable[[int], Tensor]
    choose: Callable[[Tensor], Tensor]
    key: Hashable
    context: Callable[[], Context]
    dtype: torch.dtype = torch.int64
    _tokens: Tensor | None = field(default=None, init=False)

    def run(
        self,
        runtime: PipelineRuntime,
        schedule: Schedule,
        *,
        rows: int,
        mesh: ProcessMesh,
        device: torch.device,
    ) -> Tensor:
        """Return the result, a vector of ``rows`` values, the same on all ranks of a replica.

        Collective over the replica, or over the world if experts are distributed over replicas. The
        forward has no surroundings: it draws no random numbers, and every rank of a context group
        has the whole sequence.
        """
        replace(runtime, surroundings=Surroundings()).run(schedule, self)
        # Replicas that share experts must continue together as well.
        group = mesh.world if mesh.layout.blocked else mesh.group("model")
        last = mesh.layout.last_stage_rank
        tokens = (
            torch.empty(rows, dtype=self.dtype, device=device)
            if self._tokens is None
            else self._tokens
        )
        if group.size > 1:
            # Ranks that already have tokens take part too: rounding differs between kernels, and no
            # two ranks may continue with different tokens.
            source = next(
                rank for rank in group.ranks if mesh.layout.coordinates(rank)["pipeline"] == last
            )
            dist.broadcast(tokens, source, group=group.handle)
        return tokens

    # ---- called by the runtime -------------------------------------------------------------------

    def begin(self, stage: int, microbatch: int) -> Forward:
        """Return the forward of a stage."""
        return Forward(hook="predict_step", stage=stage, microbatch=microbatch)

    def signature(self, microbatch: int) -> Hashable:
        """Return the key that determines the shape of the hidden states."""
        return "decoding", self.key

    def forward(self, forward: Forward) -> Tensor:
        """Run the forward."""
        with self.context():
            return self.call(forward.stage)

    def finish(self, forward: Forward, output: Tensor) -> None:
        """Choose the tokens; logits that are split over the vocabulary are gathered first."""
        self._tokens = self.choose(gather_full(output).float())
