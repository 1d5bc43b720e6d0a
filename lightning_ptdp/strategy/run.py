"""What the strategy has on a rank while it runs, and in what state its mixins find it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_ptdp._lightning import LightningNames, StrategyBase
from lightning_ptdp.checkpoint import Keeper
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.engine import Engine
from lightning_ptdp.parallelize import ParallelModel
from lightning_ptdp.pipeline.watchdog import Watchdog
from lightning_ptdp.strategy.interruption import Interruption
from lightning_ptdp.strategy.stopping import StopRequest
from lightning_ptdp.strategy.validation_clock import ValidationClock
from lightning_ptdp.surroundings import Surroundings
from lightning_ptdp.world.mesh import ProcessMesh

__all__ = ["Run", "RunningStrategy"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Of one call of ``fit``, ``validate``, ``test`` or ``predict``, from ``setup_environment`` to that of the next.

    Attributes:
        mesh: The process groups, which a later run takes over.
        board: The store of this life for the watchdog's notes, likewise; None if somebody else made the groups, or there are none.
        watchdog: Knows what the ranks do.
        interruption: Whether an exception ended all of them.
        stop_request: Whether somebody wants the run to end.
        validation_clock: When validation is due by the clock.
        seed: The same on all ranks.
    """

    mesh: ProcessMesh
    board: Any
    watchdog: Watchdog
    interruption: Interruption
    stop_request: StopRequest
    validation_clock: ValidationClock
    seed: int


class RunningStrategy(StrategyBase):
    """Mixin that all others of the strategy derive from: what ``setup_environment`` and ``setup`` make, and where to find it.

    Attributes:
        gradient_norm: Of the last step that was clipped by it.
    """

    _names: LightningNames
    config: PTDPConfig
    num_nodes: int
    gradient_norm: Tensor | None = None
    _keeper: Keeper
    _surroundings: Surroundings
    _run: Run | None = None
    _parallel: ParallelModel | None = None
    _engine: Engine | None = None

    @property
    def run(self) -> Run:
        """What ``setup_environment`` made."""
        assert self._run is not None
        return self._run

    @property
    def mesh(self) -> ProcessMesh:
        """The process groups of this rank, after ``setup_environment``."""
        return self.run.mesh

    @property
    def parallel(self) -> ParallelModel:
        """This rank's part of the model, as ``setup`` cut it."""
        assert self._parallel is not None
        return self._parallel

    @property
    def engine(self) -> Engine:
        """What runs the batches, after ``setup``."""
        assert self._engine is not None
        return self._engine
