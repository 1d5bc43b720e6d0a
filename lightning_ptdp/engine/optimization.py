"""Optimization after a forward: gradients, their checks, and the weight of the loss.

A check warns of unused parameters. With ``check_finite`` it names the origin of the first NaN or
Inf: every backward stores one number, the sum of this rank's gradients so far. It is read only if
the gradient of the step turns out not to be finite. No microbatch waits for the device, and only a
norm and a flag are communicated.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptdp.base.errors import PTDPError, listed
from lightning_ptdp.config import FiniteAction, PTDPConfig
from lightning_ptdp.data_parallel import Gradients, ManualGradients
from lightning_ptdp.engine.replica_step import counted_loss
from lightning_ptdp.forward.surroundings import Context
from lightning_ptdp.parallel_model import ParallelModel
from lightning_ptdp.pipeline.program_observers import Observers, StepObserver
from lightning_ptdp.schedule.actions import Action, ActionKind, Schedule
from lightning_ptdp.world.mesh import ProcessMesh

Closure = Callable[[], Tensor | None]
_SHOWN = 5


class Optimization:
    """Gradients of one rank: kept, summed and checked.

    Args:
        config: The strategy's options.
        mesh: This rank's place and groups.
        parallel: The LightningModule, already reduced to this rank's part.
        observers: Receive an event for every reduction.
        device: This rank's device.

    Attributes:
        gradients: This rank's gradients, and the tensors that the optimizer steps on.
        manual: The gradients under manual optimization of several replicas.
        losses: Losses of the last batch's microbatches, on the rank that has them; multiplied by
            their tokens if these are counted.
        factor: Weight of this replica's loss in the mean over replicas.
    """

    def __init__(
        self,
        *,
        config: PTDPConfig,
        mesh: ProcessMesh,
        parallel: ParallelModel,
        observers: Observers,
        device: torch.device,
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._parallel = parallel
        self._observers = observers
        self._device = device
        self.gradients = Gradients(
            module=parallel.module,
            config=config,
            mesh=mesh,
            parameters=parallel.parameters,
            count=len(parallel.names),
            launched=observers.reducing,
            device=device,
            shards=parallel.shards,
        )
        self.manual: ManualGradients | None = None
        self.losses: Sequence[Tensor] = []
        self.factor: float | Tensor = 1.0
        self._checks: GradientChecks | None = None

    def prepare(self, optimizer: Optimizer, *, defers: bool = False) -> None:
        """Create the gradient stores, and pass the optimizer the tensors that it steps on.

        With ``defers``, offloaded optimizer steps may run on the CPU during the next forward.

        Raises:
            ValueError: The module has trainable parameters that did not exist when it was cut, or
                the optimizer has a parameter that the module does not have; the message names them.
                Or the optimizer needs more than a rank has.
        """
        # Frozen parameters that are created late are the same on all replicas, but they have no
        # placement if the model is cut.
        self._parallel.check(frozen=self._mesh.layout.divides_model)
        apart = self._mesh.layout.world_size > 1 or self._config.runs_backward
        if self.gradients.prepare(optimizer, apart=apart, defers=defers):
            self._checks = GradientChecks(
                action=self._config.check_finite, mesh=self._mesh, gradients=self.gradients
            )
            if self._config.check_finite is not None:
                self._observers.add(self._checks)
        if isinstance(optimizer, torch.optim.LBFGS):
            self._check_evaluates_again(optimizer)

    def prepare_manual(self) -> None:
        """Average the gradients of each of the user's backwards over the replicas."""
        replicas = self._mesh.group("replica_sum")
        if replicas.size > 1:
            self.manual = ManualGradients(self._parallel.module, replicas, self._device)

    def manual_backward(self) -> Context:
        """Return the context of one backward of manual optimization."""
        if self.manual is None:
            return contextlib.nullcontext()
        return self.manual.backward(accumulates=self.gradients.accumulates)

    def evaluations(self, optimizer: Optimizer, closure: Closure) -> Closure:
        """Return the closure of a step, for ``optimizer`` to call.

        An optimizer that evaluates the loss several times in a step moves between two points
        depending on the losses. It gets the same loss on all ranks, so that all take the same path.
        Of torch's own optimizers, only LBFGS does this.
        """
        is_torchs = type(optimizer).__module__.partition(".")[0] == "torch"
        if is_torchs and not isinstance(optimizer, torch.optim.LBFGS):
            return closure
        group = self._mesh.group("replica_sum")
        evaluations = itertools.count()

        def evaluate() -> Tensor | None:
            if next(evaluations):
                self._check_evaluates_again(optimizer)
            loss = closure()
            if loss is None:
                return None
            total = self.scaled(loss).detach().clone()
            if group.size > 1:
                dist.all_reduce(total, group=group.handle)
            return total

        return evaluate

    def _check_evaluates_again(self, optimizer: Optimizer) -> None:
        """Check that such an optimizer gets the same values on every rank as on one device.

        Raises:
            ValueError: It does not; the message names the optimizer, the reason and a fix.
        """
        name = type(optimizer).__name__
        layout = self._mesh.layout
        if layout.world_size > layout.num_replicas:
            raise ValueError(
                f"{name} evaluates the loss several times in a step and uses the gradient of all "
                "parameters, but under tensor, pipeline or context parallelism a rank has only a "
                "part of it. Use it with data parallelism and microbatches only, or use an "
                "optimizer that evaluates the loss once (AdamW, SGD, ...)"
            )
        if self.gradients.stepped is not None:  # the model receives the new values after the step
            raise ValueError(
                f"{name} evaluates the loss several times in a step, but with a sharded optimizer, "
                "or with copies of the parameters in float32 or on the host, the model receives "
                "the new values only after the step. Use shard='none', master_weights=False and "
                "offload_optimizer=False"
            )

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss of a step, scaled by this replica's weight in the mean over replicas."""
        if self._mesh.group("replica_sum").size == 1:
            return loss
        if isinstance(self.factor, float):
            return loss * self.factor
        return counted_loss(loss, self.factor) * self.factor

    def check(self, optimizer: Optimizer, *, scaled: bool) -> None:
        """Check the gradients of a batch if they complete a step.

        See ``GradientChecks.complete``.
        """
        if self._checks is not None and not self.gradients.accumulates:
            self._checks.complete(
                optimizer, losses=self.losses, norm=None if scaled else self.gradients.step.norm
            )

    def close(self) -> None:
        """Detach from the module."""
        self.gradients.close()
        if self.manual is not None:
            self.manual.close()


# ---- Checks of the gradients of a step -----------------------------------------------------------


class NonFiniteError(PTDPError, RuntimeError):
    """A loss or gradient is NaN or infinite."""


@dataclass(kw_only=True, eq=False)
class GradientChecks(StepObserver):
    """Observes the actions of a step and checks its gradients.

    Attributes:
        action: Action for a step that is not finite.
        mesh: This rank's place.
        gradients: This rank's gradients.
    """

    action: FiniteAction | None
    mesh: ProcessMesh
    gradients: Gradients
    _notes: list[tuple[int, Tensor]] = field(default_factory=list)
    _mixed: bool = False
    _warned: bool = False

    # ---- events ----------------------------------------------------------------------------------

    def began(self, schedule: Schedule) -> None:
        """Discard the notes of the previous step."""
        self._notes = []
        self._mixed = False

    def finished(self, action: Action) -> None:
        """Note the sum of the gradients, until a reduction adds those of other replicas."""
        if (
            self.action is None
            or self._mixed
            or action.kind not in (ActionKind.BACKWARD, ActionKind.WEIGHT)
        ):
            return
        assert action.microbatch is not None
        with torch.no_grad():
            sums = [gradient.sum(dtype=torch.float32) for gradient in self.gradients.local()]
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
        if self.action is None or norm is None:
            return
        values = torch.stack([norm(), *(loss.float().squeeze() for loss in losses)])
        failed = (~values.isfinite()).any().to(torch.int32)
        if self.mesh.layout.world_size > 1:
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if not failed:
            return
        message = self._explain(losses)
        if self.action == "raise":
            raise NonFiniteError(message)
        if self.mesh.rank == 0:
            warnings.warn(f"a step was skipped: {message}", stacklevel=2)
        optimizer.zero_grad()

    def _explain(self, losses: Sequence[Tensor]) -> str:
        """Return a message with the first value that is not finite; collective over the world."""
        loss = next((index for index, value in enumerate(losses) if not value.isfinite()), None)
        backward = next((index for index, value in self._notes if not value.isfinite()), None)
        gradient = min(
            (
                (order, name)
                for order, name, value in self.gradients.step.named()
                if not value.isfinite().all()
            ),
            default=None,
        )
        ranks = self.mesh.world.gather((loss, backward, gradient))
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
        replicas = self.mesh.group("replica_sum")
        tensor = self.mesh.group("tensor")
        names = self.gradients.unused()
        if names and replicas.rank == 0 and tensor.rank == 0:
            warnings.warn(
                f"no loss depends on {listed(names, _SHOWN)} (seen on rank "
                f"{self.mesh.rank}). They keep their values unless another step or replica uses "
                "them. If this is intended, freeze them with requires_grad=False",
                stacklevel=2,
            )
