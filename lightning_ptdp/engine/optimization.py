"""Optimization after a forward: gradients, their checks, and the weight of the loss."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel import Gradients, ManualGradients
from lightning_ptdp.engine.gradient_checks import GradientChecks
from lightning_ptdp.engine.replica_step import counted_loss
from lightning_ptdp.forward.surroundings import Context
from lightning_ptdp.parallel_model import ParallelModel
from lightning_ptdp.pipeline.program_observers import Observers
from lightning_ptdp.world.mesh import ProcessMesh

Closure = Callable[[], Tensor | None]


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
