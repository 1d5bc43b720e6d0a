"""Looking at a step's gradients: which are missing, and where the first NaN or Inf came from.

With ``check_finite`` every backward leaves a number behind, the sum of this rank's gradients so far, that nobody reads unless the
gradient of the step turns out not to be finite: no microbatch waits for the device, and all that is sent is a norm and a flag.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ptdp.checkpoint.agreement import gather
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel import GradientBuckets, LooseGradients, SteppedParameters
from lightning_ptdp.mesh import ProcessMesh
from lightning_ptdp.parallelize import ParallelModel
from lightning_ptdp.pipeline.actions import Action, ActionKind, Schedule

__all__ = ["GradientChecks", "NonFiniteError"]

_SHOWN = 5


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite."""


class GradientChecks:
    """Observes the actions of a step, and judges its gradients.

    Args:
        config: The strategy's options.
        mesh: This rank's place.
        parallel: Names of the parameters.
        gradients: This rank's.
        stepped: What the optimizer steps on, if not the parameters.
    """

    def __init__(
        self,
        *,
        config: PTDPConfig,
        mesh: ProcessMesh,
        parallel: ParallelModel,
        gradients: GradientBuckets | LooseGradients,
        stepped: SteppedParameters | None,
    ) -> None:
        self._action, self._mesh, self._parallel = config.check_finite, mesh, parallel
        self._gradients, self._stepped = gradients, stepped
        self._trainable = {parameter for parameter in parallel.records if parameter.requires_grad}
        self._notes: list[tuple[int, Tensor]] = []
        self._mixed = self._told = False

    # ---- what it is told ----------------------------------------------------------------------------------------------

    def began(self, schedule: Schedule) -> None:
        """A step begins."""
        self._notes, self._mixed = [], False

    def started(self, action: Action) -> None:
        """Nothing to note."""

    def waiting(self, what: str, peer: int | None) -> None:
        """Nothing to note."""

    def finished(self, action: Action) -> None:
        """Note the sum, until a reduction mixes in what other replicas have."""
        if self._action is None or self._mixed or action.kind not in (ActionKind.BACKWARD, ActionKind.WEIGHT):
            return
        assert action.microbatch is not None
        with torch.no_grad():
            sums = [gradient.sum(dtype=torch.float32) for gradient in self._local()]
            if sums:
                self._notes.append((action.microbatch, torch.stack(sums).sum()))

    def reducing(self, stage: int | None, work: Any) -> None:
        """From here on the gradients are not this rank's alone."""
        self._mixed = True

    def ended(self) -> None:
        """Nothing to note."""

    # ---- what it says -------------------------------------------------------------------------------------------------

    def changed_trainable(self) -> list[nn.Parameter]:
        """Parameters that have been frozen, or are to be trained, since the gradients were laid out."""
        return [parameter for parameter in self._parallel.records if parameter.requires_grad != (parameter in self._trainable)]

    def refuse_change(self, parameter: nn.Parameter, *, accumulating: bool) -> NoReturn:
        """Say that nothing can follow the change.

        Raises:
            ValueError: Names the parameter and what works.
        """
        name = self._parallel.records[parameter].name
        if accumulating:
            raise ValueError(
                f"requires_grad of '{name}' has become {parameter.requires_grad} since the batches began whose gradients are accumulated: "
                "change it when an optimizer step is complete"
            )
        raise ValueError(
            f"requires_grad of '{name}' has become {parameter.requires_grad} since set-up, but the optimizer steps on shards or float32 "
            "copies of what could be trained then; set it before fit, call fit again after it, or use shard_optimizer=False and "
            "precision='32-true' or 'bf16-mixed' (or master_weights=False)"
        )

    def complete(self, optimizer: Any, *, losses: Sequence[Tensor], norm: Callable[[], Tensor] | None) -> None:
        """The gradients of a step are complete.

        Args:
            optimizer: Whose step is skipped, if need be.
            losses: Of the microbatches, on the rank that has them.
            norm: Computes the norm over all ranks; None where a loss scale judges the gradients.

        Raises:
            NonFiniteError: With ``check_finite="raise"``, on all ranks: a loss or gradient is not finite.
        """
        if not self._told:
            self._told = True
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
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _explain(self, losses: Sequence[Tensor]) -> str:
        """The first of everything that is not finite; collective over the world."""
        loss = next((index for index, value in enumerate(losses) if not value.isfinite()), None)
        backward = next((index for index, value in self._notes if not value.isfinite()), None)
        gradient = min(((order, name) for order, name, value in self._named() if not value.isfinite().all()), default=None)
        ranks = gather((loss, backward, gradient))
        names = [found[2] for found in ranks if found[2] is not None]
        what = f"the gradient of '{min(names)[1]}', the first such parameter, is" if names else "a loss is"
        begun = [(found[kind], kind, rank) for rank, found in enumerate(ranks) for kind in (0, 1) if found[kind] is not None]
        if not begun:
            return f"{what} not finite; no loss and no gradient was before the last microbatch was reduced over the replicas"
        microbatch, kind, rank = min(begun)
        return f"{what} not finite; it began with the {('loss', 'gradients')[kind]} of microbatch {microbatch} on rank {rank}"

    def _warn_of_unused(self) -> None:
        replicas, tensor = self._mesh.group("replica_sum"), self._mesh.group("tensor")
        names = sorted(self._parallel.records[parameter].name for parameter in self._gradients.unused())
        if names and replicas.rank == 0 and tensor.rank == 0:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            warnings.warn(
                f"no loss depends on {', '.join(names[:_SHOWN])}{more} (seen on rank {self._mesh.rank}): their gradient is zero, so that "
                "only weight decay changes them. Freeze them with requires_grad=False if that is meant",
                stacklevel=2,
            )

    def _local(self) -> Iterator[Tensor]:
        if isinstance(self._gradients, GradientBuckets):
            yield from (bucket.buffer for bucket in self._gradients.buckets())
        else:
            yield from (parameter.grad for parameter in self._parallel.records if parameter.grad is not None)

    def _named(self) -> Iterator[tuple[int, str, Tensor]]:
        pairs = [(parameter, parameter.grad) for parameter in self._parallel.records]
        if self._stepped is not None:
            pairs = [(entry.parameter, entry.value.grad) for entry in self._stepped.entries]
        for parameter, gradient in pairs:
            record = self._parallel.records[parameter]
            if gradient is not None:
                yield record.order, record.name, gradient
