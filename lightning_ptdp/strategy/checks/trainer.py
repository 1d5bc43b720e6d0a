"""What the Trainer and the LightningModule ask of Lightning's loop, and what of it a schedule cannot honour.

Each check looks at one thing; add another to ``_CHECKS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_ptdp._lightning import LightningNames
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.layout import ParallelLayout, nearest_divisors

__all__ = ["check_trainer"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is about to run."""

    module: Any
    trainer: Any
    config: PTDPConfig
    layout: ParallelLayout
    names: LightningNames

    def refuse(self, message: str) -> Exception:
        """Lightning's exception for a wrong configuration."""
        error: Exception = self.names.MisconfigurationException(message)
        return error


def check_trainer(module: Any, trainer: Any, config: PTDPConfig, layout: ParallelLayout, names: LightningNames) -> None:
    """Refuse what the schedule cannot honour.

    Raises:
        MisconfigurationException: Names what is asked for, why it cannot be, and what would work.
    """
    asked = Asked(module=module, trainer=trainer, config=config, layout=layout, names=names)
    for check in _CHECKS:
        check(asked)


def _check_manual_optimization(asked: Asked) -> None:
    if not asked.module.automatic_optimization and asked.layout.world_size > 1:
        raise asked.refuse(
            "automatic_optimization=False (manual optimization) cannot run under the ptdp strategy with several processes: the "
            "schedule, not training_step, decides when backward runs. Use automatic optimization"
        )


def _check_backward(asked: Asked) -> None:
    if asked.layout.model_parallel_size > 1 and asked.names.is_overridden("backward", asked.module):
        raise asked.refuse(
            "LightningModule.backward is overridden, but under tensor or pipeline parallelism the schedule runs the backward. Use "
            "torch.autograd hooks or on_after_backward instead"
        )


def _check_callbacks(asked: Asked) -> None:
    whole = (*asked.names.WeightAveragingCallbacks, *asked.names.TunerCallbacks)
    for callback in asked.trainer.callbacks if asked.layout.model_parallel_size > 1 else ():
        if isinstance(callback, whole):
            raise asked.refuse(
                f"the callback {type(callback).__name__} copies or re-runs the whole model, which no rank holds under tensor or "
                "pipeline parallelism. Use it with tensor_parallel_size=1 and pipeline_parallel_size=1"
            )


def _check_replicas(asked: Asked) -> None:
    nodes, replicas = asked.config.data_parallel_replicas, asked.layout.data_parallel_size
    if replicas % nodes:
        raise asked.refuse(
            f"data_parallel_replicas={nodes} does not divide the data_parallel_size of {replicas}: every node must hold as many replicas; "
            f"use one of {nearest_divisors(replicas, nodes)}"
        )


def _check_precision(asked: Asked) -> None:
    if str(asked.trainer.precision) == "16-true" and not asked.config.master_weights:
        raise asked.refuse(
            "precision='16-true' with master_weights=False: updates of float16 parameters are mostly rounded away, and their loss scale "
            "cannot be divided out in float16; use master_weights=True, precision='16-mixed' or precision='bf16-true'"
        )


_CHECKS = (_check_manual_optimization, _check_backward, _check_callbacks, _check_replicas, _check_precision)
