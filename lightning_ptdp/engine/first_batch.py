"""Inspection of the first batch of a fit that microbatches or replicas divide.

It runs on the ranks that warn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from lightning_ptdp.base.nested import Nested, batch_size
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.engine.replica_step import LightningJob
from lightning_ptdp.engine.step_habits import StepHabits, watch_samples
from lightning_ptdp.engine.step_state import Owner
from lightning_ptdp.forward.surroundings import Context
from lightning_ptdp.shims.lightning import LightningModule
from lightning_ptdp.world.mesh import ProcessMesh


class FirstBatchInspection:
    """Choice of the batch and the ranks that are inspected.

    Args:
        config: The strategy's options.
        mesh: This rank's place and groups.
        module: This rank's part of the LightningModule.
        owners: Modules on which the step may leave state.
    """

    def __init__(
        self,
        *,
        config: PTDPConfig,
        mesh: ProcessMesh,
        module: LightningModule,
        owners: Sequence[Owner],
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._module = module
        self._owners = owners
        self._is_done = False

    def begin(self, job: LightningJob) -> StepHabits | None:
        """Prepare the inspection of a batch, if it is the first that is divided.

        Returns:
            The state of the module before the batch if the step may change it, else None.
        """
        recomputes = self._config.recompute in ("full", "selective")
        changes = job.count > 1 or recomputes
        replicas = self._mesh.group("replica_sum").size
        if not self.is_first(changes or replicas > 1):
            return None
        job.inspects = job.count > 1 or replicas > 1
        job.watches = job.inspects and self._config.compile == "none"
        if not changes:
            return None
        is_last = self._mesh.group("pipeline").rank == self._mesh.layout.last_stage_rank
        return StepHabits(self._module, self._owners, recomputes=recomputes, tells_own=is_last)

    def is_first(self, divided: bool) -> bool:
        """Return True on the ranks that warn, in the first batch that is ``divided``."""
        first = divided and not self._is_done
        self._is_done |= divided
        return first and not any(self._mesh.group(axis).rank for axis in ("replica_sum", "tensor"))

    def watched(self, batch: Nested) -> Context:
        """Return the context of a step on a replica's whole batch.

        It warns of reductions over the samples of the batch.
        """
        with contextlib.suppress(ValueError):  # batch without a number of samples
            if self._config.compile == "none":
                return watch_samples(self._module, batch_size(batch), replicas=True)
        return contextlib.nullcontext()
