"""Checks before any process is started.

Each error names the field, the value and what would work."""

from lightning_ptdp.strategy.checks.data import check_data, check_source
from lightning_ptdp.strategy.checks.model import (
    CUT_MARK,
    check_initial_weights,
    check_model,
    on_meta,
    open_initial_weights,
    plan_of,
)
from lightning_ptdp.strategy.checks.module_content import (
    check_hooks_before_sums,
    check_max_norm,
    check_quantized,
    check_same_training,
    warn_of_balance_losses,
    warn_of_batch_norm,
)
from lightning_ptdp.strategy.checks.saved_content import (
    check_optimizer_state,
    check_save_hook,
    warn_of_objects,
)
from lightning_ptdp.strategy.checks.trainer import check_trainer
from lightning_ptdp.strategy.checks.trial_step import check_first_batch

__all__ = [
    "CUT_MARK",
    "check_data",
    "check_first_batch",
    "check_hooks_before_sums",
    "check_initial_weights",
    "check_max_norm",
    "check_model",
    "check_optimizer_state",
    "check_quantized",
    "check_same_training",
    "check_save_hook",
    "check_source",
    "check_trainer",
    "on_meta",
    "open_initial_weights",
    "plan_of",
    "warn_of_balance_losses",
    "warn_of_batch_norm",
    "warn_of_objects",
]
