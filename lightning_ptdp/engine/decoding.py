"""One forward of the whole model for the tokens that come next, outside of the user's steps:
through all stages, and known on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.forward.surroundings import Context, Forward, Surroundings
from lightning_ptdp.pipeline.runtime import PipelineRuntime
from lightning_ptdp.schedule.actions import Schedule
from lightning_ptdp.tensor_parallel import gather_full
from lightning_ptdp.world.mesh import ProcessMesh

__all__ = ["Decoding"]


@dataclass(kw_only=True, eq=False)
class Decoding:
    """A forward; the pipeline runtime calls it as the schedule says.

    Attributes:
        call: Runs the model as a stage; on the last one it returns the logits (b, V).
        choose: From whole logits to the tokens (b) int64.
        key: Forwards of one key have hidden states of the same shape.
        context: Around the model.
    """

    call: Callable[[int], Tensor]
    choose: Callable[[Tensor], Tensor]
    key: Hashable
    context: Callable[[], Context]
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
        """The tokens, the same on all ranks of a replica; collective over them, or where replicas
        share experts over the world.

        Of what surrounds a forward there is nothing: it draws nothing, and every rank of a context
        group has the whole sequence."""
        replace(runtime, surroundings=Surroundings()).run(schedule, self)
        # Replicas that share experts go on together as well.
        group, last = (
            mesh.world if mesh.layout.blocked else mesh.group("model"),
            mesh.layout.last_stage_rank,
        )
        tokens = (
            torch.empty(rows, dtype=torch.int64, device=device)
            if self._tokens is None
            else self._tokens
        )
        if group.size > 1:
            # Also among the ranks that have them: no two may go on with different ones, whatever
            # their kernels round.
            source = next(
                rank for rank in group.ranks if mesh.layout.coordinates(rank)["pipeline"] == last
            )
            dist.broadcast(tokens, source, group=group.handle)
        return tokens

    # ---- what the runtime asks -------------------------------------------------------------------

    def begin(self, stage: int, microbatch: int) -> Forward:
        """The forward of a stage."""
        return Forward(hook="predict_step", stage=stage, microbatch=microbatch)

    def signature(self, microbatch: int) -> Hashable:
        """Return the key that determines the shape of the hidden states."""
        return "decoding", self.key

    def forward(self, forward: Forward) -> Tensor:
        """Run it."""
        with self.context():
            return self.call(forward.stage)

    def finish(self, forward: Forward, output: Tensor) -> None:
        """Choose; where logits are split over the vocabulary, of those of the last place."""
        self._tokens = self.choose(gather_full(output).float())

    def before_last_gradients(self, stage: int, awaited: Sequence[Tensor] | None) -> None:
        """There are none."""

    def gradient_complete(self, parameter: Tensor) -> None:
        """There are none."""

    def reduce(self, stage: int) -> None:
        """There is nothing to reduce."""
