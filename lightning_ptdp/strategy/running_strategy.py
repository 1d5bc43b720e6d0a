"""Base of the strategy: state of a running rank, and agreement of ranks."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.engine import Engine
from lightning_ptdp.forward.surroundings import Context, Surroundings
from lightning_ptdp.parallel_model import ParallelModel
from lightning_ptdp.pipeline.watchdog import Watchdog
from lightning_ptdp.shims.lightning import (
    LightningNames,
    StrategyBase,
    Trainer,
    set_last_validation,
    validation_times,
)
from lightning_ptdp.strategy.parameter_guard import ParameterGuard
from lightning_ptdp.strategy.stopping import Interruption, StopRequest
from lightning_ptdp.world.mesh import ProcessMesh


class ValidationClock:
    """Decision before each batch whether a validation follows it.

    Lightning is shown a time that enforces the decision."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._since = -math.inf
        self._is_new = False

    def is_early(self) -> bool | None:
        """Return True before a batch if its end is too early for a validation; None: no clock."""
        seconds, last = validation_times(self._trainer)
        if seconds is None:
            return None
        self._is_new = math.isfinite(last)
        if self._is_new:
            self._since = last  # set by Lightning: the fit has begun, or a validation has ended
        return time.monotonic() - self._since < seconds

    def decide(self, early: bool, *, late: bool) -> None:
        """Let a validation follow the batch unless it is too early for one of the ranks.

        Args:
            early: Whether it is, the same on all ranks.
            late: Whether the answer is that of the previous batch. After a validation, it is old.
        """
        due = not early and not (late and self._is_new)
        set_last_validation(self._trainer, -math.inf if due else math.inf)


_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Run:
    """State of one call of ``fit``, ``validate``, ``test`` or ``predict``.

    The next ``setup_environment`` replaces it.

    Attributes:
        mesh: The process groups, which a later run takes over.
        board: Store for the watchdog's notes, prefixed by the name of this attempt (rendezvous.py).
            A later run takes it over. None if another library made the groups, or if there are
            none.
        watchdog: Records the actions of all ranks.
        interruption: Whether an exception ended all of the ranks.
        stop_request: Whether a signal asks the run to end.
        validation_clock: Times of validations by the clock.
        seed: The seed, the same on all ranks.
    """

    mesh: ProcessMesh
    board: dist.Store | None
    watchdog: Watchdog
    interruption: Interruption
    stop_request: StopRequest
    validation_clock: ValidationClock
    seed: int


class RunningStrategy(StrategyBase):
    """First layer of the strategy: state of a run, and collectives over the world.

    ``setup_environment`` and ``setup`` make the state. In the collectives, the ranks of one replica
    hold equal values.

    Attributes:
        gradient_norm: Norm of the last step whose gradients were clipped by it.
    """

    _names: LightningNames
    config: PTDPConfig
    num_nodes: int
    parallel_devices: list[torch.device]
    gradient_norm: Tensor | None = None
    _surroundings: Surroundings
    _run: Run | None = None
    _parallel: ParallelModel | None = None
    _engine: Engine | None = None
    _guard: ParameterGuard | None = None
    _running_step: str | None = None
    _acting_rank: int | None = None

    def refusal(self, message: str) -> Exception:
        """Return Lightning's exception for a wrong configuration."""
        return self._names.MisconfigurationException(message)

    @property
    def stop_requested(self) -> bool:
        """Return True if this rank got SIGTERM in the run."""
        return self._run is not None and self._run.stop_request.received

    @property
    def run(self) -> Run:
        """Return the state that ``setup_environment`` made."""
        assert self._run is not None
        return self._run

    @property
    def mesh(self) -> ProcessMesh:
        """Return the process groups of this rank, after ``setup_environment``."""
        return self.run.mesh

    @property
    def parallel(self) -> ParallelModel:
        """Return this rank's part of the model, as ``setup`` cut it."""
        assert self._parallel is not None
        return self._parallel

    @property
    def engine(self) -> Engine:
        """Return the engine that runs the batches, after ``setup``."""
        assert self._engine is not None
        return self._engine

    # ---- reductions, agreement and broadcasts that Lightning calls on all ranks ------------------

    @contextlib.contextmanager
    def one_step(self, hook: str, context: Callable[[], Context]) -> Iterator[None]:
        """Surround one call of the user's ``hook``, inside ``context()``.

        Under a pipeline the hook runs to its end on the last stage only. It must not call
        collectives, because the other ranks would never join them."""
        if self.mesh.group("pipeline").size > 1:
            self._running_step = hook
        guard = (
            contextlib.nullcontext()
            if self._guard is None
            else self._guard.during(hook, watches=self.config.compile == "none")
        )
        try:
            with guard, context():
                yield
        finally:
            self._running_step = None

    @contextlib.contextmanager
    def acting_as(self, rank: int) -> Iterator[None]:
        """Make this process appear as ``rank`` to user code and Lightning's ``rank_zero_only``."""
        before = self._acting_rank
        self._act_as(rank)
        try:
            yield
        finally:
            self._act_as(before)

    def _act_as(self, rank: int | None) -> None:
        """Set the rank that user code and Lightning's helpers see; None: this rank."""
        self._acting_rank = rank
        self._names.rank_zero_only.rank = self.global_rank
        self._names.fabric_rank_zero_only.rank = self.global_rank

    def _alone(self, name: str) -> bool:
        """Return True if the other ranks will not join a collective.

        This rank then handles an exception that the other ranks do not have.

        Raises:
            MisconfigurationException: The user's step calls the collective under a pipeline.
        """
        if self._running_step is not None:
            raise self.refusal(
                f"{name} in {self._running_step} would wait forever: with "
                f"pipeline_parallel_size={self.layout.pipeline_parallel_size} only the last "
                "stage reaches the end of a step. Use self.log(..., sync_dist=True) to reduce "
                "logged values, or communicate in a hook that all ranks enter with the output "
                "of the step, such as on_train_batch_end, on_validation_batch_end or "
                "on_validation_epoch_end"
            )
        return self._run is not None and self._run.interruption.is_of_this_rank_alone()

    def waiting_in(self, what: str) -> Context:
        """Return a context for waits on other ranks outside the steps.

        If a rank is lost, the error names ``what`` and the action of each rank.

        Raises:
            PeerError: Inside, instead of an error of torch's communication.
        """
        return contextlib.nullcontext() if self._run is None else self._run.watchdog.during(what)

    def reduce(
        self,
        tensor: _T,
        group: dist.ProcessGroup | None = None,
        reduce_op: dist.ReduceOp | str | None = "mean",
    ) -> _T:
        """Reduce over the replicas.

        The ranks of one replica hold equal values. The world's mean is therefore the replicas'
        mean, and a sum adds one value of each replica. Pass ``group=torch.distributed.group.WORLD``
        for the sum over all ranks."""
        if not isinstance(tensor, Tensor) or self._alone("reduce"):
            return tensor
        is_sum = reduce_op == dist.ReduceOp.SUM or str(reduce_op).lower() == "sum"
        if group is None and is_sum and self._run is not None:
            replicas = self.mesh.group("replicas")
            if replicas.size == 1:
                return tensor
            group = replicas.handle
        with self.waiting_in("reduction of a value"):
            return self._names.sync_tensor(tensor, group, reduce_op=reduce_op)

    def all_gather(
        self, tensor: Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather over the replicas, or over ``group``.

        The ranks of one replica hold equal values, which are not repeated.

        Args:
            tensor: Value of the same shape on all ranks.
            group: Another process group than the world's.
            sync_grads: Whether gradients flow back.

        Returns:
            The values, stacked along a new first dimension of the size of the group; ``tensor``
            itself in a world of one.
        """
        if not dist.is_initialized() or self._alone("all_gather"):
            return tensor
        if group in (None, dist.group.WORLD):
            replicas = self.mesh.group("replicas")
            if replicas.size == 1:
                return tensor.unsqueeze(0)
            group = replicas.handle
        with self.waiting_in("all_gather"):
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree on a decision over the whole world."""
        flag = torch.tensor(int(decision), device=self.root_device)
        if dist.is_initialized() and not self._alone("reduce_boolean_decision"):
            with self.waiting_in("agreement"):
                dist.all_reduce(flag, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks of the world."""
        if dist.is_initialized() and not self._alone("barrier"):
            with self.waiting_in(f"barrier {name!r}" if name else "barrier"):
                dist.barrier(
                    device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None
                )

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        """Send an object from rank ``src`` to the world."""
        if not dist.is_initialized() or self._alone("broadcast"):
            return obj
        object_list = [obj]
        with self.waiting_in(f"broadcast from rank {src}"):
            dist.broadcast_object_list(object_list, src)
        return object_list[0]
