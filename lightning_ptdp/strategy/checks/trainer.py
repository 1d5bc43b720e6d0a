"""What the Trainer and the LightningModule ask of Lightning's loop, and what of it a schedule cannot honour.

Each check looks at one thing; add another to ``_CHECKS``.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from lightning_ptdp._lightning import LightningNames, is_compiled, layer_sync
from lightning_ptdp.checkpoint import local_path
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel import HALF
from lightning_ptdp.strategy.checks.saved import check_extra_state, check_hyperparameters
from lightning_ptdp.world.layout import ParallelLayout, nearest_divisors

__all__ = ["check_trainer"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is about to run."""

    module: Any
    trainer: Any
    config: PTDPConfig
    layout: ParallelLayout
    names: LightningNames

    @property
    def fits(self) -> bool:
        """Whether it trains."""
        fits: bool = self.trainer.state.fn == self.names.TrainerFn.FITTING
        return fits

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
    if asked.module.automatic_optimization or not asked.fits:
        return
    if asked.layout.world_size > 1:
        raise asked.refuse(
            "automatic_optimization=False (manual optimization) cannot run under the ptdp strategy with several processes: the "
            "schedule, not training_step, decides when backward runs. Use automatic optimization, or train in one process (validate, test "
            "and predict run in any layout)"
        )
    if asked.config.runs_backward:
        raise asked.refuse(
            f"automatic_optimization=False (manual optimization) cannot run with {_microbatches(asked.config)}: training_step would run, "
            "and step its optimizers, once a microbatch. Use automatic optimization, or leave the option out"
        )
    if asked.config.check_finite is not None:
        raise asked.refuse(
            f"automatic_optimization=False (manual optimization) with check_finite={asked.config.check_finite!r}, which looks at the one "
            "backward of a batch: look at the loss in training_step, and leave check_finite out"
        )
    if asked.config.master_weights and _is_half(asked):
        raise asked.refuse(
            "automatic_optimization=False (manual optimization) with parameters in half precision and master_weights=True: "
            "toggle_optimizer and zero_grad would see the float32 copies, not the parameters. Use master_weights=False, or "
            "precision='bf16-mixed'"
        )


def _is_half(asked: Asked) -> bool:
    return str(asked.trainer.precision) in ("bf16-true", "16-true") or any(p.dtype in HALF for p in asked.module.parameters())


def _microbatches(config: PTDPConfig) -> str:
    for field in ("num_microbatches", "micro_batch_size"):
        if getattr(config, field) is not None:
            return f"{field}={getattr(config, field)}"
    return f"schedule={config.schedule!r}, which has several microbatches"


def _check_backward(asked: Asked) -> None:
    if asked.fits and asked.config.runs_backward and asked.names.is_overridden("backward", asked.module):
        raise asked.refuse(
            "LightningModule.backward is overridden, but the schedule runs the backward where there are pipeline stages, microbatches or "
            "context parallelism. Use torch.autograd hooks or on_after_backward instead, or num_microbatches=1 without a pipeline and "
            "context parallelism"
        )


def _check_iterators(asked: Asked) -> None:
    hooks = ["training_step"] if asked.fits and asked.config.runs_backward else []
    if asked.config.cuts_forward:
        hooks += ["validation_step", "test_step", "predict_step"]
    for hook in hooks:
        step = getattr(asked.module, hook)
        # None switches a step off.
        if callable(step) and "dataloader_iter" in inspect.signature(step).parameters:
            raise asked.refuse(
                f"{hook}(dataloader_iter) takes its batches itself, but the schedule cuts them into microbatches or along time. Take "
                "(batch, batch_idx), or use num_microbatches=1 without a pipeline and context parallelism"
            )


def _check_compiled(asked: Asked) -> None:
    if is_compiled(asked.module) and asked.layout.model_parallel_size > 1:
        raise asked.refuse(
            "the Trainer was given torch.compile(module), which compiles its steps as a whole, but tensor, pipeline and context "
            "parallelism cut them and communicate inside. Compile each block in place instead (for block in blocks: block.compile())"
        )


def _check_callbacks(asked: Asked) -> None:
    _check_pruning(asked)
    _check_finetuning(asked)
    if asked.layout.model_parallel_size == 1:
        return
    whole = (*asked.names.WeightAveragingCallbacks, *asked.names.TunerCallbacks)
    for callback in asked.trainer.callbacks:
        if isinstance(callback, whole):
            raise asked.refuse(
                f"the callback {type(callback).__name__} copies or re-runs the whole model, which no rank holds under tensor or "
                "pipeline parallelism. Use it with tensor_parallel_size=1 and pipeline_parallel_size=1"
            )


def _check_pruning(asked: Asked) -> None:
    name = _name_of(asked, asked.names.ModelPruning)
    if name is None:
        return
    if asked.layout.model_parallel_size > 1:
        raise asked.refuse(
            f"the callback {name} compares weights of the whole model, of which a rank would see and prune its own part only. Use it with "
            "tensor_parallel_size=1 and pipeline_parallel_size=1, or prune before fit"
        )
    if _steps_on_copies(asked):
        raise asked.refuse(
            f"the callback {name} puts new values into parameters, but the optimizer steps on shards (shard_optimizer=True) or float32 "
            "copies of them. Use shard_optimizer=False and precision='32-true' or 'bf16-mixed', or prune before fit"
        )


def _check_finetuning(asked: Asked) -> None:
    name = _name_of(asked, asked.names.BaseFinetuning)
    if name is None or not asked.fits:
        return
    if asked.layout.pipeline_parallel_size > 1:
        raise asked.refuse(
            f"the callback {name} gives the optimizer a group of parameters when it unfreezes them, which only some pipeline stages hold. "
            "Use it with pipeline_parallel_size=1, or give the optimizer all parameters and set their requires_grad yourself"
        )
    if _steps_on_copies(asked):
        raise asked.refuse(
            f"the callback {name} lets parameters be trained that the optimizer has no shards (shard_optimizer=True) or float32 copies of. "
            "Use shard_optimizer=False, and precision='32-true', 'bf16-mixed', or master_weights=False"
        )


def _name_of(asked: Asked, kind: type) -> str | None:
    """The class of the Trainer's callback of that kind, if it has one."""
    return next((type(callback).__name__ for callback in asked.trainer.callbacks if isinstance(callback, kind)), None)


def _steps_on_copies(asked: Asked) -> bool:
    shards = asked.config.shard_optimizer and asked.layout.size("replica_sum") > 1
    return shards or (asked.config.master_weights and _is_half(asked))


def _check_batch_norm(asked: Asked) -> None:
    sync = layer_sync(asked.trainer.strategy)
    if sync is None or not asked.fits or asked.layout.size("replica_sum") == 1:
        return
    if type(sync) is not asked.names.TorchSyncBatchNorm:
        raise asked.refuse(
            f"plugins=[{type(sync).__name__}()] synchronizes layers over all processes, but only replicas hold the same ones here. Use "
            "Trainer(sync_batchnorm=True)"
        )
    if asked.trainer.strategy.root_device.type == "cpu":
        raise asked.refuse(
            "sync_batchnorm=True on the CPU: torch.nn.SyncBatchNorm takes tensors of an accelerator only. Leave it out (each replica then "
            "has statistics of its own), or use a normalization that does not look at the batch"
        )


def _check_checkpoint_plugin(asked: Asked) -> None:
    plugin = asked.trainer.strategy.checkpoint_io
    if not asked.fits or type(plugin) is asked.names.TorchCheckpointIO:
        return
    instead = (
        "PTDPStrategy(async_save=True)"
        if isinstance(plugin, asked.names.AsyncCheckpointIO)
        else "on_save_checkpoint for what it adds"
    )
    raise asked.refuse(
        f"plugins=[{type(plugin).__name__}()] writes one file, but checkpoints are folders here, into which every rank writes its part by "
        f"torch's Distributed Checkpoint. Leave it out, and use {instead}"
    )


def _check_saved(asked: Asked) -> None:
    savers = asked.trainer.checkpoint_callbacks if asked.fits else []
    try:
        for saver in savers:
            local_path(getattr(saver, "dirpath", None) or asked.trainer.default_root_dir)
        for owner in (asked.module, asked.trainer.datamodule) if savers else ():
            check_hyperparameters(owner)
        if savers:
            check_extra_state(asked.module)
    except ValueError as error:
        raise asked.refuse(str(error)) from None


def _check_replicas(asked: Asked) -> None:
    nodes, replicas = asked.config.data_parallel_replicas, asked.layout.num_replicas
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


_CHECKS = (
    _check_manual_optimization,
    _check_backward,
    _check_iterators,
    _check_compiled,
    _check_callbacks,
    _check_batch_norm,
    _check_checkpoint_plugin,
    _check_saved,
    _check_replicas,
    _check_precision,
)
