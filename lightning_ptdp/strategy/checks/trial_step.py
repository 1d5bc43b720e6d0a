"""Rehearsal of the first training step before launch, and its comparison with one process."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_ptdp.base.forked_processes import try_in_child
from lightning_ptdp.base.nested import Nested, batch_size
from lightning_ptdp.base.random import seed_process
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.engine.microbatches import microbatch_sizes, split_batch
from lightning_ptdp.pipeline.containers import layer_ranges
from lightning_ptdp.pipeline.discover import KnownParts
from lightning_ptdp.pipeline.dry_run import Rehearsal
from lightning_ptdp.shims.lightning import LightningModule, Trainer, trainer_options
from lightning_ptdp.strategy.running_strategy import RunningStrategy
from lightning_ptdp.verification import VerificationError, verify
from lightning_ptdp.world.layout import ParallelLayout

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
        source: The training data: a loader, a data module, or None for the module's own loader.
        config: The strategy's options.
        layout: The degrees of parallelism.
        known: Places of the modules, if a pipeline cuts the model.

    Raises:
        ValueError: The batch cannot be split, or a stage fails although the whole model runs.
    """
    if known is None or isinstance(source, Mapping):
        return
    plan = known.plan
    runs = plan.blocks is None and sum(p.numel() for p in module.parameters()) <= _LARGEST
    if not runs and known.image_token is None:
        return
    parts = known.parts

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
        rehearsal = Rehearsal(
            model=module,
            parts=parts,
            ranges=layer_ranges(module, parts=parts, layout=layout, partition=config.partition),
            collects=plan.collects,
            pipeline_parallel_size=layout.pipeline_parallel_size,
        )
        return rehearsal.on_step(_step_of(module, microbatch))

    try_in_child(trial)


def _first_batch(trainer: Trainer, module: LightningModule, source: Any) -> Nested:
    if hasattr(source, "train_dataloader"):
        if source is not module:
            source.trainer = trainer
            source.setup("fit")
        source = source.train_dataloader()
    module.setup("fit")
    if isinstance(source, DataLoader):
        source = copy.copy(source)
        source.num_workers = 0
        source.pin_memory = False
    return next(islice(source, 1))


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
