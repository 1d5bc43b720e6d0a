"""Trials before launch: of the first batch, the first step, and the content of checkpoints."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_ptdp.base.forked_processes import try_in_child
from lightning_ptdp.base.nested import Nested, batch_size
from lightning_ptdp.base.random import seed_process
from lightning_ptdp.checkpoint import CheckpointError, left_out, optimizer_tensors
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel import GroupTrial
from lightning_ptdp.data_parallel.elementwise import equivalent_optimizer
from lightning_ptdp.engine.microbatches import microbatch_sizes, split_batch
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.pipeline.discover import KnownParts
from lightning_ptdp.shims.lightning import LightningModule, Trainer, trainer_options
from lightning_ptdp.strategy.checks.model import rehearsal_of
from lightning_ptdp.strategy.running_strategy import RunningStrategy
from lightning_ptdp.verification import VerificationError, verify
from lightning_ptdp.world.layout import ParallelLayout

_log = logging.getLogger(__name__)

_LARGEST = 50_000_000
"""Parameters of the largest model whose forward is run before launch."""


def check_first_batch(
    trainer: Trainer,
    module: LightningModule,
    source: object,
    *,
    config: PTDPConfig,
    layout: ParallelLayout,
    known: KnownParts | None,
) -> None:
    """Run all pipeline stages on a microbatch of the first batch.

    Nothing is run without a pipeline, if the plan names the blocks, or for a large model. A batch
    with images is then only split. Nothing is known if the trial fails (see ``try_in_child``), for
    example because the data module's ``prepare_data`` was not called.

    Args:
        trainer: The Trainer of the fit.
        module: The uncut module.
        source: The training data: loaders, a data module, or None for the module's own loaders.
        config: The strategy's options.
        layout: The degrees of parallelism.
        known: Places of the modules, if a pipeline cuts the model.

    Raises:
        ValueError: The batch cannot be split, or a stage fails although the whole model runs.
    """
    if known is None:
        return
    num_parameters = sum(p.numel() for p in module.parameters())
    runs = known.plan.blocks is None and num_parameters <= _LARGEST
    if not runs and known.image_token is None:
        return

    def trial() -> ValueError | None:
        module.trainer = trainer
        module.__dict__.update(log=_drop, log_dict=_drop)
        torch.compiler.set_stance("force_eager")
        batch = _first_batch(trainer, module, module if source is None else source)
        batch = module.on_before_batch_transfer(batch, 0)
        try:
            samples = batch_size(batch)
            sizes = microbatch_sizes(samples, config.microbatches(samples))
            microbatch = split_batch(batch, sizes, image_token=known.image_token)[0]
        except ValueError as error:
            return error
        if not runs:
            return None
        microbatch = module.on_after_batch_transfer(microbatch, 0)
        rehearsal = rehearsal_of(module, known, config, layout)
        return rehearsal.on_step(_step_of(module, microbatch))

    try_in_child(trial)


def _first_batch(trainer: Trainer, module: LightningModule, source: Any) -> Nested:
    if hasattr(source, "train_dataloader"):
        if source is not module:
            source.trainer = trainer
            source.setup("fit")
        source = source.train_dataloader()
    module.setup("fit")
    combined = trainer.strategy._names.CombinedLoader
    loaders = source if isinstance(source, combined) else combined(source)
    for loader in loaders.flattened:
        if isinstance(loader, DataLoader):
            loader.num_workers = 0
            loader.pin_memory = False
    return next(iter(loaders))[0]


def _step_of(module: LightningModule, batch: Nested) -> Callable[[], object]:
    """Return the training step on ``batch``, with the same random numbers at every call."""
    names = inspect.signature(module.training_step).parameters
    call = partial(module.training_step, batch, *([0] if len(names) > 1 else []))

    def step() -> object:
        seed_process(0)
        return call()

    return step


def _drop(*_: object, **__: object) -> None:
    """Log nothing, because no loop runs."""


def verify_first_step(
    strategy: RunningStrategy, trainer: Trainer, arguments: Sequence[object]
) -> None:
    """Compare the first step with one process; ``arguments`` are those of the Trainer's fit.

    Raises:
        MisconfigurationException: This process does not start all ranks.
        VerificationError: The steps differ; contains the report.
    """
    environment = strategy.cluster_environment
    option = f"verify={strategy.config.verify!r}"
    reason = f"num_nodes={strategy.num_nodes}" if strategy.num_nodes > 1 else ""
    if not isinstance(environment, strategy._names.LightningEnvironment):
        reason = f"{type(environment).__name__} has started the ranks"
    if reason:
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


# ---- Content of checkpoints ----------------------------------------------------------------------


_PLAIN = (bool, int, float, str, tuple, type(None))
_SIDE = 4
_REMEDY = (
    "Use an optimizer whose states are like its parameters (AdamW, SGD, RMSprop, ...), or "
    "Trainer(enable_checkpointing=False)"
)


def warn_of_objects(owner: object) -> None:
    """Warn of hyperparameters of a module or data module that are objects.

    Loading a checkpoint does not restore them unless the checkpoint is trusted."""
    objects = left_out(getattr(owner, "hparams", None) or {})
    if not objects:
        return
    names = ", ".join(
        f"{key!r} (a {kind})" if key else f"all of them (a {kind})" for key, kind in objects.items()
    )
    warnings.warn(
        f"hyperparameters of {type(owner).__name__} are objects and will not be restored from "
        f"checkpoints, because nothing in a checkpoint is unpickled: {names}. Pass them to "
        "load_from_checkpoint, or use weights_only=False, which trusts the checkpoint",
        stacklevel=2,
    )


def check_save_hook(module: LightningModule) -> None:
    """Check what ``on_save_checkpoint`` adds to a checkpoint, by a call in a forked process.

    Raises:
        ValueError: It adds an object, which could not be read back.
    """

    def trial() -> ValueError | None:
        content = {"epoch": 0, "global_step": 0, "state_dict": module.state_dict()}
        old_keys = set(content)
        module.on_save_checkpoint(content)
        added = {key: value for key, value in content.items() if key not in old_keys}
        for key, kind in left_out(added).items():
            return ValueError(
                f"on_save_checkpoint of {type(module).__name__} adds {key!r} (a {kind}), which "
                "cannot be restored without executing code. Add plain values or tensors, or use "
                "Trainer(enable_checkpointing=False)"
            )
        return None

    try_in_child(trial)


def check_optimizer_state(
    optimizer: Optimizer,
    trials: Sequence[GroupTrial],
    *,
    undivided: Container[int],
    device: torch.device,
) -> None:
    """Check that an optimizer's states can be stored by name, by a step on a small tensor.

    torch's own optimizers are known. Optimizers that keep other objects, or that call hooks, are
    not tried; for them the first save shows the error.

    Args:
        optimizer: The optimizer.
        trials: Facts about its groups.
        undivided: Positions of the groups whose parameters are not cut for its step.
        device: Device of the tensors.

    Raises:
        ValueError: The states cannot be stored; names the optimizer and the state.
    """
    if not _may_be_tried(optimizer):
        return
    for position, (group, trial) in enumerate(zip(optimizer.param_groups, trials, strict=True)):
        shape = (_SIDE, _SIDE) if any(dims > 1 for dims in trial.dims) else (_SIDE,)
        weight = nn.Parameter(torch.ones(shape, device=device))
        weight.grad = torch.ones_like(weight)
        probe = equivalent_optimizer(optimizer, group, [weight])
        try:
            probe.step()
        except Exception:
            return  # the optimizer needs more than a parameter and its gradient
        place = Placement.replicated(shape)
        if trial.cuts and position not in undivided:
            place = place.flattened(0, _SIDE)
        try:
            optimizer_tensors(probe, names={weight: "weight"}, placements={"weight": place})
        except CheckpointError as error:
            raise ValueError(f"{error}. {_REMEDY}") from None


def _may_be_tried(optimizer: Optimizer) -> bool:
    if type(optimizer).__module__.startswith("torch.optim.") and not isinstance(
        optimizer, torch.optim.Adafactor
    ):
        return False
    usual = vars(torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.0)).keys() | {"step"}
    hooks = (value for key, value in vars(optimizer).items() if key.endswith("_hooks"))
    return not any(hooks) and all(
        isinstance(value, _PLAIN) for key, value in vars(optimizer).items() if key not in usual
    )
