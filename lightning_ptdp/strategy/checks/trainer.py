"""Checks of options of the Trainer and the LightningModule that a schedule cannot honour.

Each function yields the reasons against one option; add new ones to ``_CHECKS``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from lightning_ptdp.blocks.local_blocks import check_compiler
from lightning_ptdp.checkpoint.remote_path import Place, located
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel import HALF
from lightning_ptdp.shims.lightning import (
    Trainer,
    fits,
    is_compiled,
    is_of_tuner,
    layer_sync,
    logs_graph,
)
from lightning_ptdp.shims.torch_distributed import has_symmetric_products
from lightning_ptdp.strategy.checkpoint_hooks import CheckpointHooks
from lightning_ptdp.strategy.model_space import checked_tensor
from lightning_ptdp.strategy.user_frames import clears_gradients
from lightning_ptdp.world.axes import nearest_divisors


def check_trainer(strategy: CheckpointHooks, trainer: Trainer) -> None:
    """Refuse options that the schedule cannot honour.

    Raises:
        MisconfigurationException: Names the option, the reason, and what would work.
    """
    for check in _CHECKS:
        for reason in check(strategy, trainer):
            raise strategy.refusal(reason)


def check_numbers(strategy: CheckpointHooks, trainer: Trainer) -> Iterator[str]:
    """Refuse numbers that Lightning does not check.

    With a negative gradient norm, for example, clipping would reverse the gradients."""
    if trainer.gradient_clip_val is not None and not trainer.gradient_clip_val >= 0:
        yield (
            f"gradient_clip_val={trainer.gradient_clip_val} must be 0 or more. Use 1.0, for "
            "example, or None for no clipping"
        )
    if trainer.accumulate_grad_batches < 1:
        yield f"accumulate_grad_batches={trainer.accumulate_grad_batches} must be 1 or more"
    if trainer.log_every_n_steps < 0:
        yield f"log_every_n_steps={trainer.log_every_n_steps} must be 0 (never) or more"
    # Lightning leaves the attribute out when the interval is a time.
    interval = getattr(trainer, "val_check_interval", None)
    if isinstance(interval, int | float) and interval <= 0:
        yield (
            f"val_check_interval={interval} must be greater than 0. To disable validation, use "
            "limit_val_batches=0"
        )


def _check_manual_optimization(strategy: CheckpointHooks, trainer: Trainer) -> Iterator[str]:
    if strategy.lightning_module.automatic_optimization or not fits(trainer):
        return
    config = strategy.config
    if strategy.layout.divides_model:
        yield (
            "automatic_optimization=False (manual optimization) cannot run with a model that "
            f"is cut ({strategy.layout.describe()}), because the schedule decides when "
            "backward runs, not training_step. Use automatic optimization, or only data "
            "parallelism (validate, test and predict run in any layout)"
        )
    if config.sharded_state(strategy.layout) != "none":
        yield (
            "automatic_optimization=False (manual optimization) cannot run with "
            f"shard={config.shard!r}, because several optimizers cannot step on shards of "
            "parameters that the step itself reads. Use shard='none'"
        )
    if config.reduce_dtype is not None and strategy.layout.size("replica_sum") > 1:
        yield (
            "automatic_optimization=False (manual optimization) ignores "
            f"reduce_dtype={config.reduce_dtype!r}, because its gradients are averaged in "
            "their own dtype. Leave reduce_dtype out"
        )
    if config.runs_backward:
        yield (
            "automatic_optimization=False (manual optimization) cannot run with "
            f"{_microbatches(config)}, because training_step would run, and step its optimizers, "
            "once per microbatch. Use automatic optimization, or leave the option out"
        )
    if config.check_finite is not None:
        yield (
            "automatic_optimization=False (manual optimization) cannot run with "
            f"check_finite={config.check_finite!r}, which checks the single backward of a "
            "batch. Check the loss in training_step, and leave check_finite out"
        )
    if config.offload_optimizer:
        yield (
            "automatic_optimization=False (manual optimization) cannot run with "
            "offload_optimizer=True, because toggle_optimizer and zero_grad would see the copies "
            "instead of the parameters. Use offload_optimizer=False"
        )
    if config.master_weights and _is_half(strategy, trainer):
        yield (
            "automatic_optimization=False (manual optimization) cannot run with parameters in "
            "half precision and master_weights=True, because toggle_optimizer and zero_grad "
            "would see the float32 copies instead of the parameters. Use "
            "master_weights=False, or precision='bf16-mixed'"
        )


def _is_half(strategy: CheckpointHooks, trainer: Trainer, *, later: bool = False) -> bool:
    """Return True if the optimizer steps on parameters in half precision.

    With ``later``, parameters that are frozen now count too.
    """
    return str(trainer.precision) in ("bf16-true", "16-true") or any(
        p.dtype in HALF and (later or p.requires_grad)
        for p in strategy.lightning_module.parameters()
    )


def _microbatches(config: PTDPConfig) -> str:
    for field in ("num_microbatches", "micro_batch_size"):
        if getattr(config, field) is not None:
            return f"{field}={getattr(config, field)}"
    return f"schedule={config.schedule!r}, which has several microbatches"


def _check_steps(strategy: CheckpointHooks, trainer: Trainer) -> Iterator[str]:
    module = strategy.lightning_module
    runs_backward = fits(trainer) and strategy.config.runs_backward
    if runs_backward and strategy._names.is_overridden("backward", module):
        yield (
            "LightningModule.backward is overridden, but with pipeline stages, microbatches "
            "or context parallelism the schedule runs the backward. Use torch.autograd hooks "
            "or on_after_backward instead, or num_microbatches=1 without a pipeline and "
            "context parallelism"
        )
    hooks = ["training_step"] if runs_backward else []
    if strategy.config.cuts_forward:
        hooks += ["validation_step", "test_step", "predict_step"]
    for hook in hooks:
        step = getattr(module, hook)
        # None disables a step.
        if callable(step) and "dataloader_iter" in inspect.signature(step).parameters:
            yield (
                f"{hook}(dataloader_iter) fetches its own batches, but the schedule must split "
                "them into microbatches or along the sequence. Use the signature (batch, "
                "batch_idx), or num_microbatches=1 without a pipeline and context parallelism"
            )
    batches = trainer.accumulate_grad_batches
    kept = runs_backward or _steps_on_copies(strategy, trainer)
    if (
        batches > 1
        and fits(trainer)
        and module.automatic_optimization
        and kept
        and clears_gradients(module.training_step)
    ):
        yield (
            "training_step calls zero_grad, which would drop the gradients of earlier batches with "
            f"accumulate_grad_batches={batches}, but the strategy keeps them. Remove the call, "
            "because Lightning clears gradients, or use accumulate_grad_batches=1"
        )
    if logs_graph(trainer) and strategy.layout.divides_model and fits(trainer):
        yield (
            "log_graph=True makes the logger trace the whole model, which no rank has under "
            "tensor, pipeline or context parallelism. Leave it out, or log the graph in one "
            "process: logger.log_graph(module)"
        )


def _check_compiled(strategy: CheckpointHooks, trainer: Trainer) -> Iterator[str]:
    if is_compiled(strategy.lightning_module) and strategy.layout.divides_model:
        yield (
            "the Trainer was given torch.compile(module), which compiles its steps as a whole, but "
            "tensor, pipeline and context parallelism cut them and communicate inside. Compile "
            "each block in place instead: PTDPStrategy(compile='blocks')"
        )
    if is_compiled(strategy.lightning_module) and strategy.config.compiles != "none":
        yield (
            "the Trainer was given torch.compile(module), but "
            f"compile={strategy.config.compile!r} would compile the blocks inside again. Give "
            "it the module itself, or use compile='none'"
        )
    if strategy.config.compile == "blocks":
        check_compiler(strategy.root_device, strategy.config.compile_options or {})


def _check_overlap(strategy: CheckpointHooks, trainer: Trainer) -> Iterator[str]:
    if strategy.config.tensor_overlap != "symmetric":
        return
    size = strategy.config.tensor_parallel_size
    node_size = strategy.num_processes
    if strategy.root_device.type != "cuda":
        reason = f"the device is {strategy.root_device.type!r}"
    elif node_size % size:
        reason = f"tensor_parallel_size={size} does not divide the {node_size} GPUs of a node"
    elif not has_symmetric_products():
        reason = f"torch {torch.__version__} does not support it"
    else:
        return
    yield (
        "tensor_overlap='symmetric' lets GPUs of one node read each other's memory, but "
        f"{reason}. Use a number of pieces, such as tensor_overlap=4"
    )


def _check_callbacks(strategy: CheckpointHooks, trainer: Trainer) -> Iterator[str]:
    for callback in trainer.callbacks:
        yield from _check_callback(strategy, trainer, callback)


def _check_callback(strategy: CheckpointHooks, trainer: Trainer, callback: object) -> Iterator[str]:
    names = strategy._names
    layout = strategy.layout
    name = type(callback).__name__
    on_copies = _steps_on_copies(strategy, trainer, later=True)
    prunes = isinstance(callback, names.ModelPruning)
    finetunes = isinstance(callback, names.BaseFinetuning) and fits(trainer)
    averages = isinstance(callback, names.WeightAveragingCallbacks)
    copies_model = averages or isinstance(callback, names.TunerCallbacks)
    if copies_model and strategy.config.sharded_state(layout) == "parameters":
        yield (
            f"the callback {name} copies or re-runs the whole model, which no rank has with "
            "shard='parameters'. Use it with shard='gradients'"
        )
    # context ranks hold all weights, and average the same ones
    if copies_model and (layout.size("shards") > 1 if averages else layout.divides_model):
        yield (
            f"the callback {name} copies or re-runs the whole model, but {layout.describe()} "
            "divides it, or its sequences, among ranks. Use only data parallelism"
        )
    if prunes and layout.divides_model:
        yield (
            f"the callback {name} compares weights of the whole model, but {layout.describe()} "
            "divides it, or its sequences, among ranks. Use only data parallelism, or prune before "
            "fit"
        )
    if prunes and on_copies:
        yield (
            f"the callback {name} writes new values into parameters, but the optimizer steps on "
            "shards or copies of them. Use shard='none', offload_optimizer=False "
            "and precision='32-true' or 'bf16-mixed', or prune before fit"
        )
    if finetunes and layout.pipeline_parallel_size > 1:
        yield (
            f"the callback {name} adds a parameter group to the optimizer when it unfreezes "
            "parameters, but only some pipeline stages have these parameters. Use it with "
            "pipeline_parallel_size=1, or give the optimizer all parameters and set their "
            "requires_grad yourself"
        )
    if finetunes and on_copies:
        yield (
            f"the callback {name} unfreezes parameters for which the optimizer has no shards "
            "or copies. Use shard='none', offload_optimizer=False, and "
            "precision='32-true', 'bf16-mixed', or master_weights=False"
        )


def _check_tuner(strategy: CheckpointHooks, trainer: Trainer) -> Iterator[str]:
    """Refuse a Tuner whose result and final exception would stay in the started processes."""
    method = strategy.config.start_method
    starts = strategy.launcher is not None and strategy.num_processes > 1
    if starts and method != "popen" and any(map(is_of_tuner, trainer.callbacks)):
        yield (
            f"Tuner returns its result in the processes that start_method={method!r} starts, not in "
            "this one. Use start_method='popen', or run the Tuner with devices=1"
        )


def _steps_on_copies(strategy: CheckpointHooks, trainer: Trainer, *, later: bool = False) -> bool:
    return (
        strategy.config.sharded_state(strategy.layout) != "none"
        or strategy.config.offload_optimizer
        or (strategy.config.master_weights and _is_half(strategy, trainer, later=later))
    )


def _check_batch_norm(strategy: CheckpointHooks, trainer: Trainer) -> Iterator[str]:
    sync = layer_sync(strategy)
    if sync is None or not fits(trainer) or strategy.layout.size("replica_sum") == 1:
        return
    if type(sync) is not strategy._names.TorchSyncBatchNorm:
        yield (
            f"plugins=[{type(sync).__name__}()] synchronizes layers over all processes, but "
            "only replicas have the same layers. Use Trainer(sync_batchnorm=True)"
        )
    if strategy.root_device.type == "cpu":
        yield (
            "sync_batchnorm=True does not work on the CPU, because torch.nn.SyncBatchNorm "
            "needs an accelerator. Leave it out (each replica then has its own statistics), "
            "or use a normalization that does not depend on the batch"
        )


def _check_checkpoint_plugin(strategy: CheckpointHooks, trainer: Trainer) -> Iterator[str]:
    plugin = strategy.checkpoint_io
    if not fits(trainer) or type(plugin) is strategy._names.TorchCheckpointIO:
        return
    why_no_file = _why_no_file(strategy, trainer)
    writes_file = strategy.writes_file
    if strategy.config.checkpoint_format == "auto":
        writes_file = writes_file and not why_no_file
    if writes_file or not trainer.checkpoint_callbacks:
        return
    alternative = (
        "PTDPStrategy(async_save=True)"
        if isinstance(plugin, strategy._names.AsyncCheckpointIO)
        else "on_save_checkpoint for additional content"
    )
    fallback = f"checkpoint_format={strategy.config.checkpoint_format!r}"
    if strategy.folder_callback and strategy.config.checkpoint_format == "auto":
        fallback = f"{strategy.folder_callback} needs folders, unless checkpoint_format='file'"
    reason = why_no_file or fallback
    yield (
        f"plugins=[{type(plugin).__name__}()] writes one file, but every rank writes its part "
        f"into a folder ({reason}). Leave it out, and use {alternative}"
    )


def _check_saved(strategy: CheckpointHooks, trainer: Trainer) -> Iterator[str]:
    savers: list[object] = [*trainer.checkpoint_callbacks] if fits(trainer) else []
    if fits(trainer) and strategy.config.snapshot_every_n_steps is not None:
        savers.append(None)
    reason = _why_no_file(strategy, trainer)
    if savers and reason and strategy.config.checkpoint_format == "file":
        yield (
            f"checkpoint_format='file', but {reason}. Use 'auto' or 'folder', into which "
            "every rank writes its part"
        )
    try:
        for saver in savers:
            _check_place(
                strategy, located(getattr(saver, "dirpath", None) or trainer.default_root_dir)
            )
        if savers and not strategy.writes_file:
            for name, module in strategy.lightning_module.named_modules():
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    checked_tensor(f"{name}._extra_state".lstrip("."), module.get_extra_state())
    except ValueError as error:
        yield str(error)


def _why_no_file(strategy: CheckpointHooks, trainer: Trainer) -> str:
    """Return the option that rules out a single file, before the optimizer's tensors exist."""
    copies = strategy.config.reason_for_copies if _steps_on_copies(strategy, trainer) else ""
    return strategy.why_no_file() or copies


def _check_place(strategy: CheckpointHooks, place: Place) -> None:
    if isinstance(place, Path) or strategy._names.writes_elsewhere(strategy.checkpoint_io, ""):
        return
    if strategy.config.snapshot_every_n_steps is not None:
        raise ValueError(
            "snapshot_every_n_steps needs a mounted folder for the link to the snapshots, but "
            f"checkpoints are saved to {place}. Leave snapshots out, or save to a mounted folder"
        )
    if place.url.startswith("memory:") and strategy.layout.world_size > 1:
        raise ValueError(
            f"{place} is in the memory of one process, but {strategy.layout.world_size} ranks "
            "save there. Give an address that all ranks share"
        )
    place.check_writable()


def _check_replicas(strategy: CheckpointHooks, trainer: Trainer) -> Iterator[str]:
    nodes = strategy.config.data_parallel_replicas
    replicas = strategy.layout.num_replicas
    if replicas % nodes:
        yield (
            f"data_parallel_replicas={nodes} does not divide the data_parallel_size of "
            f"{replicas}, but every node must have the same number of replicas. Use one of "
            f"{nearest_divisors(replicas, nodes)}"
        )


def _check_precision(strategy: CheckpointHooks, trainer: Trainer) -> Iterator[str]:
    precision = str(trainer.precision)
    if precision == "16-true" and not strategy.config.master_weights:
        yield (
            "precision='16-true' with master_weights=False would round away most updates of "
            "float16 parameters, and their gradients cannot be unscaled in float16. Use "
            "master_weights=True, precision='16-mixed' or precision='bf16-true'"
        )
    if strategy.config.offload_optimizer and precision.startswith("16-"):
        yield (
            f"precision={precision!r} scales the loss, and torch unscales gradients on the GPU "
            "only, but with offload_optimizer=True the optimizer's are on the CPU. Use "
            "precision='bf16-mixed' or 'bf16-true', or offload_optimizer=False"
        )


_CHECKS = (
    check_numbers,
    _check_manual_optimization,
    _check_steps,
    _check_compiled,
    _check_overlap,
    _check_callbacks,
    _check_tuner,
    _check_batch_norm,
    _check_checkpoint_plugin,
    _check_saved,
    _check_replicas,
    _check_precision,
)
