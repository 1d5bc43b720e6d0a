"""The names of Lightning that the strategy needs, private ones included, for either of its two namespaces.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code under two names with unrelated classes. Everything that is not public
API is named here and nowhere else (tests/test_lightning_names.py watches them).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as StrategyBase
else:
    StrategyBase = object  # what mixins of a strategy derive from; the class of a namespace adds its own ParallelStrategy

__all__ = [
    "CLIS",
    "LOADERS",
    "LightningNames",
    "NAMESPACES",
    "StrategyBase",
    "TRAINERS",
    "announce_sigterm",
    "count_replicas",
    "is_compiled",
    "layer_sync",
    "lightning_names",
    "register_signal_handlers",
    "replace_signal_handlers",
]

NAMESPACES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}

LOADERS = {
    module: "pl_load"
    for namespace, fabric in NAMESPACES.items()
    for module in (f"{namespace}.core.saving", f"{fabric}.plugins.io.torch_io")
}
"""Modules that read checkpoints, and their name for the function that does."""

CLIS = {f"{namespace}.cli": ("LightningCLI", "_parse_ckpt_path") for namespace in NAMESPACES}
"""Modules with a command line, whose method takes hyperparameters from the file of ``--ckpt_path``."""

UPLOADERS = {
    f"{namespace}.loggers.{module}": (logger, "_scan_and_log_checkpoints")
    for namespace in NAMESPACES
    for module, logger in (("mlflow", "MLFlowLogger"), ("wandb", "WandbLogger"))
}
"""Modules of loggers that copy checkpoints, which they find by ``_scan_checkpoints``; the logger and its method that does."""

TRAINERS = {f"{namespace}.trainer.trainer": "_verify_strategy_supports_compile" for namespace in NAMESPACES}
"""Modules with a Trainer, and their name for the function that refuses compiled modules for strategies that it does not know."""


@dataclass(frozen=True, kw_only=True)
class LightningNames:
    """One namespace's classes and functions."""

    namespace: str
    ParallelStrategy: Any
    LightningModule: Any
    Callback: Any
    MisconfigurationException: Any
    TrainerFn: Any
    rank_zero_only: Any
    fabric_rank_zero_only: Any
    is_overridden: Any
    WeightAveragingCallbacks: tuple[Any, ...]
    TunerCallbacks: tuple[Any, ...]
    ModelPruning: Any
    BaseFinetuning: Any
    LambdaCallback: Any
    ThroughputMonitor: Any
    TorchSyncBatchNorm: Any
    TorchCheckpointIO: Any
    AsyncCheckpointIO: Any
    casting: tuple[Any, ...]  # ``convert_module`` of the precision plugins that change dtypes only
    LightningEnvironment: Any
    SubprocessLauncher: Any
    MultiProcessingLauncher: Any
    init_process_group: Any
    default_backend: Any
    reset_seed: Any
    isolate_rng: Any
    sync_tensor: Any
    optimizers_to_device: Any


@lru_cache(maxsize=len(NAMESPACES))
def lightning_names(namespace: str) -> LightningNames:
    """The names of ``namespace``.

    Raises:
        ValueError: It is not one of Lightning's two namespaces.
    """
    if namespace not in NAMESPACES:
        raise ValueError(f"namespace={namespace!r} must be one of {sorted(NAMESPACES)}")
    fabric = NAMESPACES[namespace]

    def take(module: str, name: str) -> Any:
        return getattr(importlib.import_module(module), name)

    callbacks = f"{namespace}.callbacks"
    return LightningNames(
        namespace=namespace,
        LightningModule=take(namespace, "LightningModule"),
        Callback=take(namespace, "Callback"),
        ParallelStrategy=take(f"{namespace}.strategies", "ParallelStrategy"),
        MisconfigurationException=take(f"{namespace}.utilities.exceptions", "MisconfigurationException"),
        TrainerFn=take(f"{namespace}.trainer.states", "TrainerFn"),
        rank_zero_only=take(f"{namespace}.utilities.rank_zero", "rank_zero_only"),
        fabric_rank_zero_only=take(f"{fabric}.utilities.rank_zero", "rank_zero_only"),
        is_overridden=take(f"{namespace}.utilities.model_helpers", "is_overridden"),
        WeightAveragingCallbacks=(take(callbacks, "StochasticWeightAveraging"), take(callbacks, "WeightAveraging")),
        TunerCallbacks=(take(callbacks, "BatchSizeFinder"), take(callbacks, "LearningRateFinder")),
        ModelPruning=take(callbacks, "ModelPruning"),
        BaseFinetuning=take(callbacks, "BaseFinetuning"),
        LambdaCallback=take(callbacks, "LambdaCallback"),
        ThroughputMonitor=take(callbacks, "ThroughputMonitor"),
        TorchSyncBatchNorm=take(f"{namespace}.plugins", "TorchSyncBatchNorm"),
        TorchCheckpointIO=take(f"{namespace}.plugins.io", "TorchCheckpointIO"),
        AsyncCheckpointIO=take(f"{namespace}.plugins.io", "AsyncCheckpointIO"),
        casting=tuple(
            take(f"{namespace}.plugins.precision", name).convert_module
            for name in ("Precision", "HalfPrecision", "DoublePrecision")
        ),
        LightningEnvironment=take(f"{namespace}.plugins.environments", "LightningEnvironment"),
        SubprocessLauncher=take(f"{namespace}.strategies.launchers", "_SubprocessScriptLauncher"),
        MultiProcessingLauncher=take(f"{namespace}.strategies.launchers", "_MultiProcessingLauncher"),
        init_process_group=take(f"{fabric}.utilities.distributed", "_init_dist_connection"),
        default_backend=take(f"{fabric}.utilities.distributed", "_get_default_process_group_backend_for_device"),
        reset_seed=take(f"{fabric}.utilities.seed", "reset_seed"),
        isolate_rng=take(f"{namespace}.utilities.seed", "isolate_rng"),
        sync_tensor=take(f"{fabric}.utilities.distributed", "_sync_ddp_if_available"),
        optimizers_to_device=take(f"{fabric}.utilities.optimizer", "_optimizers_to_device"),
    )


def layer_sync(strategy: Any) -> Any:
    """The plugin that Lightning gives a strategy for ``sync_batchnorm=True``, or that its user gave; None without."""
    return strategy._layer_sync


def validation_interval(trainer: Any) -> float | None:
    """Seconds between validations, if ``val_check_interval`` is a time."""
    seconds: float | None = trainer._val_check_time_interval
    return seconds


def last_validation(trainer: Any) -> float:
    """By ``time.monotonic()``, when the last validation ended or the fit began; only where there is a ``validation_interval``."""
    last: float = trainer._last_val_time
    return last


def set_last_validation(trainer: Any, last: float) -> None:
    """Lightning validates at the end of a batch if that is as long ago as ``validation_interval``."""
    trainer._last_val_time = last


def count_replicas(trainer: Any, names: LightningNames, *, replicas: int, ranks: int) -> None:
    """Have Lightning's monitors of throughput count ``replicas`` of ``ranks`` devices each; they take every process for a replica."""
    for monitor in trainer.callbacks:
        if isinstance(monitor, names.ThroughputMonitor):
            for throughput in monitor._throughputs.values():
                throughput.world_size = replicas
                throughput.available_flops = monitor.available_flops and monitor.available_flops * ranks


def is_compiled(module: Any) -> bool:
    """Whether the Trainer was given what ``torch.compile`` returns for the LightningModule: its steps are compiled."""
    return getattr(module, "_compiler_ctx", None) is not None


def replace_signal_handlers(trainer: Any, *, sigterm: Callable[[int, Any], None] | None, register: Callable[[], None]) -> None:
    """Have ``trainer`` call ``register`` where it registers its handlers, which it does after the strategy's ``setup``, and use ``sigterm``
    for its own notifier of SIGTERM (None: that one)."""
    connector = trainer._signal_connector
    assert hasattr(connector, "_sigterm_notifier_fn") and hasattr(connector, "register_signal_handlers")
    connector.register_signal_handlers = register
    if sigterm is not None:
        connector._sigterm_notifier_fn = sigterm


def register_signal_handlers(trainer: Any) -> None:
    """What Lightning does itself there; it restores the handlers of all signals at the end of a run."""
    connector = trainer._signal_connector
    type(connector).register_signal_handlers(connector)


def announce_sigterm(trainer: Any) -> None:
    """What Lightning's own notifier does in the end: the loops stop after the batch."""
    trainer._signal_connector.received_sigterm = True
