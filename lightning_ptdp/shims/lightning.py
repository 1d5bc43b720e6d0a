"""Names of Lightning that the strategy needs, for either of its two namespaces.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code under two names with unrelated
classes. All names that are not public API are used in this file only (tests/test_lightning_names.py
checks them).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import lru_cache, partial, wraps
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.plugins import LayerSync, Precision
    from lightning.pytorch.strategies import ParallelStrategy as StrategyBase
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as Launcher
else:
    # Names for annotations, of either namespace. The layers of a strategy derive from its base, and
    # the class of a namespace adds its own base.
    LightningCLI = LightningModule = Trainer = Precision = StrategyBase = Launcher = object


REPLACED = "_replaced_by_lightning_ptdp"

NAMESPACES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}

LOADERS = {
    module: "pl_load"
    for namespace, fabric in NAMESPACES.items()
    for module in (f"{namespace}.core.saving", f"{fabric}.plugins.io.torch_io")
}
"""Modules that read checkpoints, and the name of the reading function in them."""

CLIS = {f"{namespace}.cli": "LightningCLI._parse_ckpt_path" for namespace in NAMESPACES}
"""Modules with a command line, and its method for ``--ckpt_path``.

The method takes hyperparameters from the checkpoint file.
"""

SCANNERS = {
    f"{namespace}.loggers.{module}": "_scan_checkpoints"
    for namespace in NAMESPACES
    for module in ("mlflow", "wandb")
}
"""Modules of loggers that copy checkpoints, and the function by which they find them."""

UPLOADERS = {
    f"{namespace}.loggers.wandb": "WandbLogger._scan_and_log_checkpoints"
    for namespace in NAMESPACES
}
"""Modules of loggers that copy only files, and the copying method."""

SAVERS = {
    f"{namespace}.callbacks.model_checkpoint": "ModelCheckpoint._find_last_checkpoints"
    for namespace in NAMESPACES
}
"""Modules with ModelCheckpoint, and its method for ``ckpt_path="last"``.

In object storage, the method loses the protocol of addresses.
"""

TRAINERS = {
    f"{namespace}.trainer.trainer": "_verify_strategy_supports_compile" for namespace in NAMESPACES
}
"""Modules with a Trainer, and the name of the function that refuses compiled modules.

The function refuses them for strategies that it does not know.
"""


_NAMES: dict[str, str | tuple[str, ...]] = {
    "ParallelStrategy": "{core}.strategies:ParallelStrategy",
    "LightningModule": "{core}:LightningModule",
    "Callback": "{core}:Callback",
    "Trainer": "{core}:Trainer",
    "CombinedLoader": "{core}.utilities:CombinedLoader",
    "DummyLogger": "{core}.loggers.logger:DummyLogger",
    "Writers": tuple(
        f"{{core}}.callbacks:{name}"
        for name in (
            "Checkpoint",
            "ProgressBar",
            "ModelSummary",
            "BasePredictionWriter",
            "DeviceStatsMonitor",
            "ThroughputMonitor",
        )
    ),
    "MisconfigurationException": "{core}.utilities.exceptions:MisconfigurationException",
    "rank_zero_only": "{core}.utilities.rank_zero:rank_zero_only",
    "fabric_rank_zero_only": "{fabric}.utilities.rank_zero:rank_zero_only",
    "is_overridden": "{core}.utilities.model_helpers:is_overridden",
    "WeightAveragingCallbacks": (
        "{core}.callbacks:StochasticWeightAveraging",
        "{core}.callbacks:WeightAveraging",
    ),
    "TunerCallbacks": ("{core}.callbacks:BatchSizeFinder", "{core}.callbacks:LearningRateFinder"),
    "ModelPruning": "{core}.callbacks:ModelPruning",
    "BaseFinetuning": "{core}.callbacks:BaseFinetuning",
    "LambdaCallback": "{core}.callbacks:LambdaCallback",
    "ThroughputMonitor": "{core}.callbacks:ThroughputMonitor",
    "TorchSyncBatchNorm": "{core}.plugins:TorchSyncBatchNorm",
    "TorchCheckpointIO": "{core}.plugins.io:TorchCheckpointIO",
    "AsyncCheckpointIO": "{core}.plugins.io:AsyncCheckpointIO",
    "MixedPrecision": "{core}.plugins.precision:MixedPrecision",
    # precision plugins that only change dtypes
    "casting": tuple(
        f"{{core}}.plugins.precision:{plugin}.convert_module"
        for plugin in ("Precision", "HalfPrecision", "DoublePrecision")
    ),
    "LightningEnvironment": "{core}.plugins.environments:LightningEnvironment",
    "SubprocessLauncher": "{core}.strategies.launchers:_SubprocessScriptLauncher",
    "MultiProcessingLauncher": "{core}.strategies.launchers:_MultiProcessingLauncher",
    "WorkerOutput": "{core}.strategies.launchers.multiprocessing:_WorkerOutput",
    "init_process_group": "{fabric}.utilities.distributed:_init_dist_connection",
    "default_backend": "{fabric}.utilities.distributed:_get_default_process_group_backend_for_device",
    "reset_seed": "{fabric}.utilities.seed:reset_seed",
    "seed_worker": "{fabric}.utilities.seed:pl_worker_init_function",
    "sized_len": "{fabric}.utilities.data:sized_len",
    "isolate_rng": "{core}.utilities.seed:isolate_rng",
    "sync_tensor": "{fabric}.utilities.distributed:_sync_ddp_if_available",
    "optimizers_to_device": "{fabric}.utilities.optimizer:_optimizers_to_device",
}
"""Place of each object in a namespace, by its name in this package."""


class LightningNames(SimpleNamespace):
    """Classes and functions of one namespace: those of the table, and ``namespace``."""

    def writes_elsewhere(self, plugin: object, path: object) -> bool:
        """Return True if the checkpoint plugin must write ``path``, instead of this package.

        The plugin is then the user's, or the path is a URL that only Lightning's plugin knows.
        """
        return type(plugin) is not self.TorchCheckpointIO or "://" in str(path).removeprefix(
            "file://"
        )


@lru_cache(maxsize=len(NAMESPACES))
def lightning_names(namespace: str) -> LightningNames:
    """Return the names of ``namespace``.

    Raises:
        ValueError: It is not one of Lightning's two namespaces.
    """
    if namespace not in NAMESPACES:
        raise ValueError(f"namespace={namespace!r} must be one of {sorted(NAMESPACES)}")

    def take(place: str) -> object:
        return pkgutil.resolve_name(place.format(core=namespace, fabric=NAMESPACES[namespace]))

    objects = {
        name: take(place) if isinstance(place, str) else tuple(map(take, place))
        for name, place in _NAMES.items()
    }
    return LightningNames(namespace=namespace, **objects)


def replace_once(owner: object, name: str, instead: Callable[..., object]) -> None:
    """Replace ``owner.name``, a function of Lightning's, by a call of ``instead``.

    ``instead`` gets the original function before the arguments. Nothing happens if the function has
    been replaced before, or if ``owner`` has no such name: it may be None, or a module that is
    still being imported.
    """
    original = getattr(owner, name, None)
    if original is None or hasattr(original, REPLACED):
        return

    @wraps(original)
    def replaced(*args: object, **kwargs: object) -> object:
        return instead(original, *args, **kwargs)

    setattr(replaced, REPLACED, True)
    setattr(owner, name, replaced)


def place_of_saves(saver: Any, trainer: Trainer) -> str:
    """Return the folder of a ``ModelCheckpoint``, which is decided when a run starts."""
    return str(saver._ModelCheckpoint__resolve_ckpt_dir(trainer))


def replace_after_closure(plugin: Precision, instead: Callable[..., None]) -> None:
    """Let a precision plugin call ``instead`` between the backward and the step.

    ``instead`` gets the plugin's own hooks as first argument.
    """
    plugin._after_closure = partial(instead, partial(type(plugin)._after_closure, plugin))


def fits(trainer: Trainer) -> bool:
    """Return True if the Trainer runs ``fit``."""
    return bool(trainer.state.fn == "fit")


def layer_sync(strategy: StrategyBase) -> LayerSync | None:
    """Return the plugin for synchronized layers; None if there is none.

    Lightning creates it for ``sync_batchnorm=True``, or the user provides it.
    """
    return strategy._layer_sync


def validation_times(trainer: Trainer) -> tuple[float | None, float]:
    """Return the seconds between validations and the start of the current interval.

    The seconds are None unless ``val_check_interval`` is a time. The start is the time, by
    ``time.monotonic()``, at which the last validation ended or the fit began.
    """
    return trainer._val_check_time_interval, getattr(trainer, "_last_val_time", float("inf"))


def set_last_validation(trainer: Trainer, last: float) -> None:
    """Set the time of the last validation.

    Lightning validates at the end of a batch if the interval has passed since that time.
    """
    trainer._last_val_time = last


def count_replicas(trainer: Trainer, names: LightningNames, *, replicas: int, ranks: int) -> None:
    """Let Lightning's throughput monitors count ``replicas`` of ``ranks`` devices each.

    By default they count every process as a replica.
    """
    for monitor in trainer.callbacks:
        if isinstance(monitor, names.ThroughputMonitor):
            for throughput in monitor._throughputs.values():
                throughput.world_size = replicas
                throughput.available_flops = (
                    monitor.available_flops and monitor.available_flops * ranks
                )


def keep_samplers(trainer: Trainer) -> None:
    """Prevent Lightning from replacing the samplers of data loaders by distributed ones."""
    assert hasattr(trainer._accelerator_connector, "use_distributed_sampler")
    trainer._accelerator_connector.use_distributed_sampler = False


def trainer_options(trainer: Trainer) -> dict[str, Any]:
    """Return the arguments of another Trainer that makes the same steps as ``trainer``."""
    strategy = trainer.strategy
    names = (
        "precision",
        "gradient_clip_val",
        "gradient_clip_algorithm",
        "accumulate_grad_batches",
        "max_steps",
        "max_epochs",
    )
    return {
        **{name: getattr(trainer, name) for name in names},
        "accelerator": "cpu" if strategy.root_device.type == "cpu" else "gpu",
        "devices": strategy.num_processes,
        "callbacks": [*trainer.callbacks],
        "use_distributed_sampler": trainer._accelerator_connector.use_distributed_sampler,
        "sync_batchnorm": layer_sync(strategy) is not None,
    }


def is_compiled(module: object) -> bool:
    """Return True if the LightningModule's steps are compiled.

    The Trainer was then given the result of ``torch.compile``.
    """
    return getattr(module, "_compiler_ctx", None) is not None


def is_profiling(hook: object) -> bool:
    """Return True if a forward hook belongs to ``PyTorchProfiler``.

    This profiler times modules where they run.
    """
    return (
        type(getattr(getattr(hook, "func", None), "__self__", None)).__name__
        == "RegisterRecordFunction"
    )


def logs_graph(trainer: Trainer) -> bool:
    """Return True if a logger records the graph of the module's forward at the start of a fit."""
    # Read ``vars``, because other loggers may return an attribute for any name.
    return any(vars(logger).get("_log_graph") for logger in trainer.loggers)


def is_of_tuner(callback: object) -> bool:
    """Return True for a callback of ``Tuner``, which ends the run by an exception."""
    return getattr(callback, "_early_exit", False) is True


def replace_signal_handlers(
    trainer: Trainer,
    *,
    sigterm: Callable[[int, FrameType | None], None] | None,
    register: Callable[[], None],
) -> None:
    """Replace the signal handlers of ``trainer``.

    ``register`` is called where the Trainer registers its handlers, after the strategy's ``setup``.
    ``sigterm`` replaces Lightning's notifier of SIGTERM (None: keep it). Ranks then need not
    exchange messages about SIGTERM before every batch and wait for them.
    """
    connector = trainer._signal_connector
    assert hasattr(connector, "_sigterm_notifier_fn") and hasattr(
        connector, "register_signal_handlers"
    )
    connector.register_signal_handlers = register
    if sigterm is not None:
        connector._sigterm_notifier_fn = sigterm
        vars(trainer.fit_loop.epoch_loop)[_TELLS_OF_SIGTERM] = _nothing


_TELLS_OF_SIGTERM = "_broadcast_sigterm_tensor"


def _nothing() -> None: ...


def register_signal_handlers(trainer: Trainer) -> None:
    """Register the signal handlers that Lightning registers itself.

    Lightning restores the handlers of all signals at the end of a run.
    """
    connector = trainer._signal_connector
    type(connector).register_signal_handlers(connector)


def load_only_named_checkpoints(trainer: Trainer) -> None:
    """Prevent ``fit`` without ``ckpt_path`` from loading ``hpc_ckpt_*`` by itself.

    In SLURM jobs Lightning loads such a checkpoint from ``default_root_dir``.
    """
    connector = trainer._checkpoint_connector
    assert hasattr(connector, "_user_managed")
    connector._user_managed = True


def set_restored_path(trainer: Trainer, path: str) -> None:
    """Let Lightning's messages name the checkpoint that was read instead of the requested one."""
    connector = trainer._checkpoint_connector
    assert hasattr(connector, "_ckpt_path")
    connector._ckpt_path = path


def dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Return the content of a checkpoint, which ``save_checkpoint`` would write."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def requeue_handler(trainer: Trainer) -> Callable[[int, FrameType | None], None]:
    """Return Lightning's handler that saves ``hpc_ckpt_*`` and requeues a SLURM job.

    Lightning does not register it if the signal already has a handler.
    """
    return trainer._signal_connector._slurm_sigusr_handler_fn


def announce_sigterm(trainer: Trainer) -> None:
    """Let the loops stop after the batch, as Lightning's own notifier does."""
    trainer._signal_connector.received_sigterm = True


def keep_model_summary(trainer: Trainer, module: LightningModule) -> None:
    """Let the Trainer's ``ModelSummary`` describe ``module`` as it is now, uncut.

    By default the callback reads the module when a fit starts, and counts parameters when it is
    asked.
    """
    for callback in trainer.callbacks:
        if (
            not getattr(callback, "_max_depth", 0)
            or not hasattr(callback, "_summary")
            or module.example_input_array is not None
        ):
            continue
        summary = callback._summary(trainer, module)
        numbers = ("total_parameters", "trainable_parameters", "model_size", "total_training_modes")
        snapshot = SimpleNamespace(
            **{name: getattr(summary, name) for name in numbers},
            _get_summary_data=summary._get_summary_data().copy,
        )
        callback._summary = partial(_kept_summary, snapshot)


def _kept_summary(snapshot: SimpleNamespace, *_: object) -> SimpleNamespace:
    return snapshot
