"""Checks of a step's gradients: unused parameters, and the origin of the first NaN or Inf.

With ``check_finite`` every backward stores one number, the sum of this rank's gradients so far. It
is read only if the gradient of the step turns out not to be finite. No microbatch waits for the
device, and only a norm and a flag are communicated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptdp.base.errors import PTDPError, listed
from lightning_ptdp.config import FiniteAction
from lightning_ptdp.data_parallel import Gradients
from lightning_ptdp.pipeline.program_observers import StepObserver
from lightning_ptdp.schedule.actions import Action, ActionKind, Schedule
from lightning_ptdp.world.mesh import ProcessMesh

_SHOWN = 5


class NonFiniteError(PTDPError, RuntimeError):
    """A loss or gradient is NaN or infinite."""


class GradientChecks(StepObserver):
    """Observes the actions of a step and checks its gradients.

    Args:
        action: Action for a step that is not finite.
        mesh: This rank's place.
        gradients: This rank's gradients.
    """

    def __init__(
        self, *, action: FiniteAction | None, mesh: ProcessMesh, gradients: Gradients
    ) -> None:
        self._action = action
        self._mesh = mesh
        self._gradients = gradients
        self._notes: list[tuple[int, Tensor]] = []
        self._mixed = self._warned = False

    # ---- events ----------------------------------------------------------------------------------

    def began(self, schedule: Schedule) -> None:
        """Discard the notes of the previous step."""
        self._notes = []
        self._mixed = False

    def finished(self, action: Action) -> None:
        """Note the sum of the gradients, until a reduction adds those of other replicas."""
        if (
            self._action is None
            or self._mixed
            or action.kind not in (ActionKind.BACKWARD, ActionKind.WEIGHT)
        ):
            return
        assert action.microbatch is not None
        with torch.no_grad():
            sums = [gradient.sum(dtype=torch.float32) for gradient in self._gradients.local()]
            if sums:
                self._notes.append((action.microbatch, torch.stack(sums).sum()))

    def reducing(self, stage: int | None, work: object) -> None:
        """Stop taking notes: from here on the gradients include those of other ranks."""
        self._mixed = True

    # ---- checks ----------------------------------------------------------------------------------

    def complete(
        self, optimizer: Optimizer, *, losses: Sequence[Tensor], norm: Callable[[], Tensor] | None
    ) -> None:
        """Check the complete gradients of a step.

        Args:
            optimizer: Its step is skipped if necessary.
            losses: Losses of the microbatches, on the rank that has them.
            norm: Computes the norm over all ranks; None if a loss scale checks the gradients.

        Raises:
            NonFiniteError: With ``check_finite="raise"``, on all ranks: a loss or gradient is not
                finite.
        """
        if not self._warned:
            self._warned = True
            self._warn_of_unused()
        if self._action is None or norm is None:
            return
        values = torch.stack([norm(), *(loss.float() for loss in losses)])
        failed = (~values.isfinite()).any().to(torch.int32)
        if self._mesh.layout.world_size > 1:
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if not failed:
            return
        message = self._explain(losses)
        if self._action == "raise":
            raise NonFiniteError(message)
        if self._mesh.rank == 0:
            warnings.warn(f"a step was skipped: {message}", stacklevel=2)
        optimizer.zero_grad()

    def _explain(self, losses: Sequence[Tensor]) -> str:
        """Return a message with the first value that is not finite; collective over the world."""
        loss = next((index for index, value in enumerate(losses) if not value.isfinite()), None)
        backward = next((index for index, value in self._notes if not value.isfinite()), None)
        gradient = min(
            (
                (order, name)
                for order, name, value in self._gradients.step.named()
                if not value.isfinite().all()
            ),
            default=None,
        )
        ranks = self._mesh.world.gather((loss, backward, gradient))
        names = [record[2] for record in ranks if record[2] is not None]
        subject = (
            f"the gradient of '{min(names)[1]}' (the first such parameter) is"
            if names
            else "a loss is"
        )
        failures = [
            (record[kind], kind, rank)
            for rank, record in enumerate(ranks)
            for kind in (0, 1)
            if record[kind] is not None
        ]
        if not failures:
            return (
                f"{subject} not finite. All losses and gradients were finite until the last "
                "microbatch was reduced over the replicas"
            )
        microbatch, kind, rank = min(failures)
        return (
            f"{subject} not finite. The first such value was the {('loss', 'gradients')[kind]} of "
            f"microbatch {microbatch} on rank {rank}"
        )

    def _warn_of_unused(self) -> None:
        replicas = self._mesh.group("replica_sum")
        tensor = self._mesh.group("tensor")
        names = self._gradients.unused()
        if names and replicas.rank == 0 and tensor.rank == 0:
            warnings.warn(
                f"no loss depends on {listed(names, _SHOWN)} (seen on rank "
                f"{self._mesh.rank}). They keep their values unless another step or replica uses "
                "them. If this is intended, freeze them with requires_grad=False",
                stacklevel=2,
            )
