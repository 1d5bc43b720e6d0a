"""Comparison of the first step with one process: ``PTDPStrategy(verify="first_step")``.

It runs before training starts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lightning_ptdp.shims.lightning import Trainer, trainer_options
from lightning_ptdp.strategy.running_strategy import RunningStrategy
from lightning_ptdp.verification import VerificationError, verify

__all__ = ["verify_first_step"]

_log = logging.getLogger(__name__)


def verify_first_step(
    strategy: RunningStrategy, trainer: Trainer, arguments: Sequence[object]
) -> None:
    """Compare the first step with one process; ``arguments`` are those of the Trainer's fit.

    Raises:
        MisconfigurationException: This process does not start all ranks.
        VerificationError: The steps differ; contains the report.
    """
    environment: Any = strategy.cluster_environment
    option = f"verify={strategy.config.verify!r}"
    starts_ranks = isinstance(environment, strategy._names.LightningEnvironment)
    if strategy.num_nodes > 1 or not starts_ranks:
        reason = (
            f"{type(environment).__name__} has started the ranks"
            if not starts_ranks
            else f"num_nodes={strategy.num_nodes}"
        )
        raise strategy.refusal(
            f"{option} forks processes on this machine before training, but {reason}. Leave it "
            "out, and first run ptdp verify, or lightning_ptdp.verify, on one machine"
        )
    if strategy.num_processes > 1 and environment.creates_processes_externally:
        return  # started by rank 0, which has verified
    report = verify(
        strategy.lightning_module,
        *arguments[1:4],
        strategy=strategy,
        steps=1,
        **trainer_options(trainer),
    )
    if not report.equal:
        raise VerificationError(f"{option}: {report}")
    _log.info("verify: %s", str(report).partition("\n")[0])
