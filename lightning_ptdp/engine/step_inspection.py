"""Detection of steps whose result depends on microbatches or replicas.

It runs in the first batch of a fit, and each finding is reported once by name. It needs no
computation: tensors have a version counter, and torch reports the called functions.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lightning_ptdp.base.errors import listed
from lightning_ptdp.base.nested import Nested, batch_size, iterate_tensors
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.engine.loss_inspection import (
    PAGE,
    Sums,
    divided_sums,
    divisor_of,
    warn_of_constants,
    warn_of_counted,
    warn_of_divisors,
    warn_of_loss,
    warn_of_slices,
)
from lightning_ptdp.engine.sample_calls import SampleCalls
from lightning_ptdp.engine.step_state import Owner, StepState, counting_modules
from lightning_ptdp.forward.surroundings import BatchPart
from lightning_ptdp.shims.lightning import LightningModule
from lightning_ptdp.shims.torch import has_compiled_parts
from lightning_ptdp.world.mesh import ProcessMesh

if TYPE_CHECKING:
    from lightning_ptdp.engine.replica_step import LightningJob

_NORMS = (nn.modules.batchnorm._NormBase,)
_SHOWN = 3


@dataclass(kw_only=True, eq=False)
class FirstBatchInspection:
    """Inspection of the first batch of a fit that microbatches or replicas divide.

    It runs on the ranks that warn.

    Attributes:
        config: The strategy's options.
        mesh: This rank's place and groups.
        module: This rank's part of the LightningModule.
        owners: Modules on which the step may leave state.
    """

    config: PTDPConfig
    mesh: ProcessMesh
    module: LightningModule
    owners: Sequence[Owner]
    _is_done: bool = False

    def begin(self, job: LightningJob, batch: Nested) -> Callable[[], None]:
        """Prepare the inspection of a batch, if it is the first that is divided.

        Returns:
            A function for the end of the batch. It warns of tensors that the step has written.

        Raises:
            ValueError: The batch is a list of samples.
        """
        recomputes = self.config.recompute in ("full", "selective")
        changes = job.count > 1 or recomputes
        replicas = self.mesh.group("replica_sum").size
        if not self.is_first(changes or replicas > 1):
            return lambda: None
        if job.count > 1:
            _check_samples(batch, getattr(self.module.trainer.train_dataloader, "batch_size", None))
        if job.count > 1 or replicas > 1:
            job.inspection = self._of(job.sizes)
        if not changes:
            return lambda: None
        # All stages hold the LightningModule's own attributes. The last one warns of them.
        is_last = self.mesh.group("pipeline").rank == self.mesh.layout.last_stage_rank
        versions = {
            name: (value, value._version)
            for name, value in _tensors(self.module)
            if not value.is_inference() and (is_last or "." in name)
        }
        watched = [owner for owner in self.owners if not owner.name]
        watched += counting_modules(self.module, self.owners)
        state = StepState(watched if is_last else ())
        epochs = self._scheduler_epochs()

        def warn_of_writes() -> None:
            ignored = () if recomputes else _NORMS
            names = dict.fromkeys(self._written(versions, state, ignored, job.sizes))
            if is_last and self._scheduler_epochs() != epochs:
                names["self.lr_schedulers()"] = None
            if not names:
                return
            again = " and recomputation runs blocks again" if recomputes else ""
            warnings.warn(
                f"training_step writes {listed(names, _SHOWN)}, but it runs once "
                f"for each of {job.count} microbatches{again}. A run reads the value of the "
                "previous microbatch, not of the previous batch. Write it in on_train_batch_end, "
                f"or use num_microbatches=1 ({PAGE})",
                stacklevel=2,
            )

        return warn_of_writes

    def _written(
        self,
        versions: Mapping[str, tuple[Tensor, int]],
        state: StepState,
        ignored: tuple[type[nn.Module], ...],
        sizes: Sequence[int],
    ) -> Iterator[str]:
        current = dict(_tensors(self.module))
        for name, (value, version) in versions.items():
            owner = self.module.get_submodule(name.rpartition(".")[0])
            if not isinstance(owner, ignored) and (
                current.get(name) is not value or value._version != version
            ):
                yield f"self.{name}"
        for change in state.changes():
            # A tensor with a graph is a part of this run's loss. No later run reads it.
            tensors = iterate_tensors(change.value)
            if (
                change.how == "set"
                and not change.path[0]
                and len(change.path) == 2
                and any(tensor.grad_fn is None for tensor in tensors)
            ):
                yield change.name
            # A number that grows by one in each run counts runs, unless it counts samples.
            numbers = state.before(change.path), change.value
            if (
                change.how == "set"
                and all(isinstance(number, int | float) for number in numbers)
                and 1 < len(sizes) < sum(sizes)
                and numbers[1] - numbers[0] == len(sizes)
            ):
                yield change.name

    def _scheduler_epochs(self) -> list[int]:
        configs = self.module.trainer.lr_scheduler_configs
        return [getattr(config.scheduler, "last_epoch", 0) for config in configs]

    def is_first(self, divided: bool) -> bool:
        """Return True on the ranks that warn, in the first batch that is ``divided``."""
        first = divided and not self._is_done
        self._is_done |= divided
        return first and not any(self.mesh.group(axis).rank for axis in ("replica_sum", "tensor"))

    def undivided(self, batch: Nested) -> BatchInspection | None:
        """Return the inspection of a step on a replica's full batch, if it is the first one."""
        if not self.is_first(self.mesh.group("replica_sum").size > 1):
            return None
        samples = 0
        with contextlib.suppress(ValueError):  # batch without a number of samples
            samples = batch_size(batch)
        return self._of((samples,))

    def _of(self, sizes: Sequence[int]) -> BatchInspection:
        divides = len(sizes) > 1 or self.mesh.group("replicas").size > 1
        watches = divides and sizes[0] > 0 and self.config.compile == "none"
        return BatchInspection(self.module, sizes, divides, watches)


@dataclass(eq=False)
class BatchInspection:
    """Inspection of the steps on one batch, and of their losses.

    Attributes:
        module: The LightningModule.
        sizes: Numbers of samples in the microbatches; 0: unknown.
        divides_samples: Whether microbatches or replicas divide the samples, not only context ranks
            the sequences.
        watches: Whether to inspect the functions that the first step calls.
    """

    module: nn.Module
    sizes: Sequence[int]
    divides_samples: bool
    watches: bool
    _is_named: bool = field(default=False, init=False)
    _divisors: list[Tensor | None] = field(default_factory=list, init=False)
    _sums: list[Sums] = field(default_factory=list, init=False)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Warn of the first line inside that reduces the samples to one value per feature.

        Hand-written normalization does this. A module with compiled parts is not watched, because
        they would be compiled again for the next microbatch.
        """
        if not self.watches or has_compiled_parts(self.module):
            yield
            return
        own = {*self.module.parameters(), *self.module.buffers()}
        # The samples of two replicas, gathered, are as many as two views of those of one.
        reductions = SampleCalls(self.sizes[0], own=own, two_views=len(self.sizes) > 1)
        with reductions:
            yield
        if reductions.place is not None:
            self._is_named = True
            part, remedy = (
                ("replica", "gather the samples of all replicas first")
                if len(self.sizes) == 1
                else ("microbatch", "use num_microbatches=1")
            )
            warnings.warn(
                f"{reductions.place} over dimension 0, the samples of one {part}, but one process "
                f"computes it over the whole batch. If the loss depends on it, {remedy} ({PAGE})",
                stacklevel=3,
            )

    def check_loss(self, loss: Tensor, batch: Nested, part: BatchPart | None = None) -> None:
        """Warn of a loss that depends on how the batch is divided.

        Args:
            loss: Loss of a microbatch, in their order.
            batch: The microbatch.
            part: The part of it that the step used; None: all of it.
        """
        sizes = self.sizes
        if not self._divisors:
            self._check_first(loss, part)
        if len(sizes) == 1:
            return
        self._divisors.append(divisor_of(loss, batch))
        self._sums.append(divided_sums(loss, sizes[0]))
        if len(self._divisors) == len(sizes) and len(set(sizes)) == 1:
            warn_of_divisors(self._divisors)
            warn_of_constants(self._sums, samples=sizes[0], total=sum(sizes))

    def _check_first(self, loss: Tensor, part: BatchPart | None) -> None:
        samples = self.sizes[0]
        is_only = len(self.sizes) == 1
        if self.divides_samples:
            compares = not self._is_named
            warn_of_loss(loss, samples=samples, replicas=is_only, compares=compares)
        if part is None:
            warn_of_counted(loss, samples=samples if is_only else None)
            return
        warn_of_counted(
            loss,
            part.num_targets,
            slice_samples=samples,
            divides_samples=self.divides_samples,
        )
        tokens = part.length // part.group.size
        warn_of_slices(loss, samples=samples, tokens=tokens, alone=not self.divides_samples)


def _check_samples(batch: Nested, loaded: int | None) -> None:
    """Check that the samples are along dimension 0, for a loader of ``loaded`` samples per batch.

    Raises:
        ValueError: The batch is a list of samples.
    """
    samples = batch_size(batch)
    if not isinstance(loaded, int) or loaded < 2:
        return
    if (
        isinstance(batch, list | tuple)
        and len(batch) == loaded
        and (samples != loaded or isinstance(batch[0], Mapping))
    ):
        raise ValueError(
            f"the batch is a list of {loaded} samples, so microbatches would get parts of each of "
            "their tensors. Stack them in the collate function, with the samples along dimension "
            "0, or use pipeline_parallel_size=1 and num_microbatches=1"
        )
    shapes = [tensor.shape for tensor in iterate_tensors(batch)]
    if samples != loaded and all(len(shape) > 1 and shape[1] == loaded for shape in shapes):
        warnings.warn(
            f"all tensors of the batch have {loaded} elements along dimension 1, as many as the "
            "loader has samples, but microbatches are split along dimension 0. If dimension 1 has "
            "the samples, transpose the tensors in the collate function",
            stacklevel=2,
        )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
