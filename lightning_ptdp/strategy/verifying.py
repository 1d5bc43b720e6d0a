"""``PTDPStrategy(verify="first_step")``: the first step is compared with one process before training starts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from lightning_ptdp._lightning import Trainer, trainer_options
from lightning_ptdp.strategy.run import RunningStrategy
from lightning_ptdp.verification import VerificationError, verify

__all__ = ["check_verifiable", "verify_first_step"]

_log = logging.getLogger(__name__)


def check_verifiable(strategy: RunningStrategy) -> None:
    """Refuse where this process does not start all ranks.

    Raises:
        MisconfigurationException: Says why.
    """
    environment = strategy.cluster_environment
    if strategy.num_nodes > 1:
        reason = f"num_nodes={strategy.num_nodes}"
    elif environment is not None and not isinstance(environment, strategy._names.LightningEnvironment):
        reason = f"{type(environment).__name__} has started the ranks"
    elif torch.cuda.is_initialized():
        reason = "this process has used CUDA already"
    else:
        return
    raise strategy.refusal(
        f"verify={strategy.config.verify!r} forks processes on this machine before training, but {reason}. Leave it out, and run "
        "ptdp verify, or lightning_ptdp.verify, on one machine first"
    )


def verify_first_step(strategy: RunningStrategy, trainer: Trainer, arguments: Sequence[object]) -> None:
    """Compare the first step with one process; ``arguments`` are those of the Trainer's fit.

    Raises:
        VerificationError: They differ; holds the report.
    """
    environment = strategy.cluster_environment
    if environment is not None and strategy.num_processes > 1 and environment.creates_processes_externally:
        return  # started by rank 0, which has verified
    given: list[Any] = [*arguments, None, None, None]
    _, train, validation, datamodule = given[:4]
    report = verify(
        strategy.lightning_module,
        datamodule,
        strategy=strategy,
        steps=1,
        train_dataloaders=train,
        val_dataloaders=validation,
        **trainer_options(trainer),
    )
    if not report.equal:
        raise VerificationError(f"verify={strategy.config.verify!r}: {report}")
    _log.info("verify: %s", str(report).partition("\n")[0])
