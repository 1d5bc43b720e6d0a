"""Strategy for Lightning: its hooks, each a few lines that call other packages.

Order of a run: ``setup_environment`` (groups) -> ``setup`` (convert, cut, give values, shard,
optimizer, buckets) -> for every batch ``training_step`` (the schedule runs forward and backward) ->
``zero_grad`` -> ``backward`` (installs the gradients) -> clipping -> ``optimizer_step``. Gradients
are hidden from Lightning between ``training_step`` and ``backward``, because Lightning clears them
there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_ptdp.base.requirements import check_url
from lightning_ptdp.callbacks.run_summary import StrategySummary, summarize
from lightning_ptdp.checkpoint import same_outcome
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel import check_elementwise, overlaps_gather
from lightning_ptdp.engine import Engine
from lightning_ptdp.forward.surroundings import Context, Surroundings
from lightning_ptdp.parallelize import parallelize
from lightning_ptdp.parameters.materialize import awaits_values
from lightning_ptdp.parameters.uncut_view import UncutView
from lightning_ptdp.pipeline.balance import KnownParts
from lightning_ptdp.shims.lightning import (
    LightningModule,
    StrategyBase,
    Trainer,
    count_replicas,
    fits,
    keep_model_summary,
    lightning_names,
)
from lightning_ptdp.shims.peft import set_magnitudes
from lightning_ptdp.strategy.auto import chosen_layout, report_forecast, wants_choice
from lightning_ptdp.strategy.block_passes import BlockSetting, apply_block_passes
from lightning_ptdp.strategy.checks import (
    CUT_MARK,
    check_data,
    check_first_batch,
    check_initial_weights,
    check_model,
    check_optimizer_state,
    check_packing,
    check_quantized,
    check_save_hook,
    check_trainer,
    on_meta,
    open_initial_weights,
    plan_of,
    warn_of_balance_losses,
    warn_of_batch_norm,
    warn_of_objects,
)
from lightning_ptdp.strategy.distributed_sampling import read_alike
from lightning_ptdp.strategy.forward_contexts import make_surroundings
from lightning_ptdp.strategy.launch import make_launcher
from lightning_ptdp.strategy.layout_choice import Forecast, LayoutChoice
from lightning_ptdp.strategy.optimizers import settle_groups
from lightning_ptdp.strategy.out_of_memory import explain_memory
from lightning_ptdp.strategy.parameter_guard import ParameterGuard
from lightning_ptdp.strategy.precision import convert, prepare_loss_scaling, replacing
from lightning_ptdp.strategy.restoring import load_initial_weights
from lightning_ptdp.strategy.saving import FolderSaves
from lightning_ptdp.strategy.steps import StepHooks
from lightning_ptdp.strategy.strategy_arguments import constructor
from lightning_ptdp.strategy.verifying import verify_first_step

__all__ = ["PTDPStrategy", "strategy_class"]


class _PTDPStrategy(StepHooks):
    """Lightning's hooks of the strategy that set up, check and end a run.

    The layers below it are, in order: ``RunningStrategy`` (collectives), ``World`` (ranks and
    groups), ``CheckpointHooks`` and ``StepHooks``. The constructor takes the fields of
    ``PTDPConfig`` and the arguments of Lightning's own strategies."""

    model: nn.Module
    strategy_name = "ptdp"

    def __init__(self, *, layout: LayoutChoice | None = None, **options: Any) -> None:
        ours = {
            field.name: options.pop(field.name)
            for field in fields(PTDPConfig)
            if field.name in options
        }
        self.config = PTDPConfig(**ours)
        self._chooses_layout = wants_choice(layout, self.config)
        self._forecast: Forecast | None = None
        self.num_nodes = 1
        self._parent = os.getppid()
        self._interfaces: list[str] = []
        self._surroundings = Surroundings()
        self._saves = FolderSaves()
        self._named_groups = []
        self._known_parts: KnownParts | None = None
        super().__init__(**options)

    # ---- before launch ---------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        # Raise before any process is started if the degrees do not fit the number of devices.
        _ = self.layout
        self._launcher = make_launcher(self, self._names.namespace, self.config.start_method)

    def check_before_launch(self, trainer: Trainer | None, arguments: Sequence[object]) -> None:
        """Check everything that is known before processes start.

        Args:
            trainer: The Trainer; None outside of its functions.
            arguments: Arguments of the Trainer's function.
        """
        if trainer is None or self.lightning_module is None:
            return
        for argument in arguments:  # includes ckpt_path
            check_url(argument)
        self.note_callbacks(trainer.callbacks)
        # the train dataloader and the data module
        sources = [each for each in (*arguments[1:2], *arguments[3:4]) if each is not None]
        if fits(trainer):
            self.check_processes()
            self._choose_layout(trainer, sources)
        check_trainer(self, trainer)
        self.check_machine()
        if not self.model_space.is_cut:
            self.check(self.lightning_module)
        if not fits(trainer):
            return
        if trainer.checkpoint_callbacks and self.is_global_zero and not self.writes_file:
            for owner in (self.lightning_module, *sources):
                warn_of_objects(owner)
            if self.starts_all_ranks and self._names.is_overridden(
                "on_save_checkpoint", self.lightning_module
            ):
                check_save_hook(self.lightning_module)
        for source in sources:
            check_data(source, self.config, self.layout)
            check_packing(self.lightning_module, source, self.config)
        if self.starts_all_ranks and not self.model_space.is_cut:
            check_first_batch(
                trainer,
                self.lightning_module,
                sources[0] if sources else None,
                config=self.config,
                layout=self.layout,
                known=self._known_parts,
            )
        if self.config.verify is not None:
            verify_first_step(self, trainer, arguments)

    def _choose_layout(self, trainer: Trainer, sources: Sequence[object]) -> None:
        if self._chooses_layout:  # a further fit continues in the same layout
            self.config, self._forecast = chosen_layout(self, trainer, sources)
            self._chooses_layout = False
            if self.is_global_zero:
                print(self._forecast.text, flush=True)

    def check(self, lightning_module: LightningModule, datamodule: object = None) -> None:
        """Check a module (and data module) against the layout without starting anything.

        Raises:
            ValueError: Names the field, its value and values that would work.
        """
        check_initial_weights(lightning_module, self.config)
        convert = replacing(self.precision_plugin, self._names)
        self._known_parts = check_model(lightning_module, self.config, self.layout, convert=convert)
        if datamodule is not None:
            check_data(datamodule, self.config, self.layout)
            check_packing(lightning_module, datamodule, self.config)

    # ---- the model -------------------------------------------------------------------------------

    def tensor_init_context(self, empty_init: bool | None = None) -> Context:
        """Return the context in which modules are created.

        They are created on the CPU (or, in ``configure_model``, on the meta device) and moved in
        ``setup``."""
        context: Context = self.precision_plugin.tensor_init_context()
        return context

    def model_sharded_context(self) -> Context:
        """Return the context in which ``configure_model`` runs."""
        return on_meta() if self.config.meta_init else contextlib.nullcontext()

    def setup(self, trainer: Trainer) -> None:
        """Set up the model (``parallelize``), its values, the optimizer, and last the gradients."""
        fitting = fits(trainer)
        self.accelerator.setup(trainer)
        self.note_callbacks(trainer.callbacks)  # again, with those of configure_callbacks
        check_trainer(self, trainer)
        replicas = self.layout.data_parallel_size
        count_replicas(
            trainer, self._names, replicas=replicas, ranks=self.layout.world_size // replicas
        )
        if not self.model_space.is_cut:
            if fitting and self.layout.divides_model:
                keep_model_summary(trainer, self.lightning_module)
            self._parallelize()
        self.load_awaited_values()
        self.model_to_device()
        if fitting:
            self.setup_optimizers(trainer)
        if self._engine is not None:
            self._engine.close()
        self._engine = Engine(
            config=self.config,
            mesh=self.mesh,
            parallel=self.parallel,
            surroundings=self._surroundings,
            watchdog=self.run.watchdog,
            seed=self.run.seed,
            device=self.root_device,
        )
        if fitting:
            self._prepare_optimization(trainer)
        self.setup_precision_plugin()
        if fitting:
            self._names.optimizers_to_device(self.optimizers, self.root_device)

    def _parallelize(self) -> None:
        module = self.lightning_module
        if self.layout.divides_model and CUT_MARK in vars(module):
            check_model(module, self.config, self.layout)
        # without model parallelism the module has not been built before launch
        check_quantized(module)
        built_without_values = awaits_values(module)
        with same_outcome("reading the headers of the initial weights"):
            weights = open_initial_weights(module) if self.config.meta_init else None
        self._parallel = parallelize(
            module,
            convert=self._convert,
            plan=partial(plan_of, config=self.config),
            mesh=self.mesh,
            partition=self.config.partition,
            seed=self.run.seed,
            device=self.root_device,
            left=() if weights is None else weights.names,
            known=self._known_parts,
        )
        if self.layout.divides_model:
            module.__dict__[CUT_MARK] = self.layout.describe()
            self._guard = ParameterGuard(module, self.parallel.parameters, self.layout.describe())
        self._surroundings = make_surroundings(
            config=self.config,
            mesh=self.mesh,
            parallel=self.parallel,
            seed=self.run.seed,
            device=self.root_device,
        )
        self._parallel = apply_block_passes(
            BlockSetting(
                config=self.config,
                mesh=self.mesh,
                parallel=self.parallel,
                surroundings=self._surroundings,
                device=self.root_device,
            )
        )
        # a checkpoint has all of the values
        resumes = module.trainer.ckpt_path is not None and module.strict_loading
        if weights is not None and not resumes:
            load_initial_weights(self.model_space, weights)
        if built_without_values:
            set_magnitudes(module)

    def _convert(self) -> None:
        self.model = convert(self, self.mesh)
        if fits(self.lightning_module.trainer) and self.is_global_zero:
            warn_of_batch_norm(self.model, self.config, self.layout)
            warn_of_balance_losses(self.model, self.config, self.layout)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizer with the groups that the uncut model would have.

        There is one optimizer, except under manual optimization."""
        parallel, parameters = self.parallel, self.parallel.parameters
        view = (
            contextlib.nullcontext({})
            if parallel.whole is None
            else self._whole_view(parallel.whole)
        )
        with view as foreign:
            self._make_optimizers(trainer)
        # before the groups are checked, which does not name parameters
        parallel.check(frozen=self.layout.divides_model)
        with self.waiting_in("comparing the optimizer's parameter groups"):
            trials = settle_groups(
                self.optimizers, foreign, parameters, config=self.config, layout=self.layout
            )
        for optimizer, groups in zip(self.optimizers, trials, strict=True):
            check_elementwise(optimizer, groups, device=self.root_device)
            if trainer.checkpoint_callbacks and not self.writes_file:
                check_optimizer_state(optimizer, groups, device=self.root_device)

    def _whole_view(
        self, whole: UncutView
    ) -> contextlib.AbstractContextManager[dict[nn.Parameter, str]]:
        """Return a context in which the module looks uncut."""
        parameters, pipeline = self.parallel.parameters, self.mesh.group("pipeline")
        trained = {managed.name: p.requires_grad for p, managed in parameters.items()}
        if pipeline.size > 1:  # stages may have frozen parameters since the cut
            with self.waiting_in("exchanging the names of frozen parameters"):
                ranks: list[dict[str, bool]] = [{}] * pipeline.size
                dist.all_gather_object(ranks, trained, group=pipeline.handle)
            trained = {name: trains for rank in ranks for name, trains in rank.items()}
        return whole.lent(parameters, trained=trained, device=self.root_device)

    def _make_optimizers(self, trainer: Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            # Lightning's own message recommends manual optimization, which a schedule cannot
            # honour.
            raise self.refusal(
                "configure_optimizers returned several optimizers, but the ptdp strategy "
                "trains with one. Use parameter groups of one optimizer, or manual "
                "optimization with data parallelism only and without microbatches"
            ) from error

    def _prepare_optimization(self, trainer: Trainer) -> None:
        """Prepare the gradients, the values that the optimizer steps on, and the loss scale."""
        self._saves.in_background = self.config.async_save
        for managed in self.parallel.parameters.values():
            managed.step_on(managed.parameter)
        self._named_groups = self.model_space.names_of_groups()
        prepare_loss_scaling(self.precision_plugin, self.optimizers, device=self.root_device)
        if not self.lightning_module.automatic_optimization:
            self.engine.optimization.prepare_manual()
            # Autograd makes the gradients, which are averaged over the replicas. The optimizers are
            # the user's.
            return
        (optimizer,) = self.optimizers
        overlaps = overlaps_gather(trainer, self.config.overlap_parameter_gather, self._names)
        self.engine.optimization.prepare(optimizer, overlaps=overlaps)

    def model_to_device(self) -> None:
        """Move this rank's part of the model to its device."""
        self.model.to(self.root_device)

    def process_dataloader(self, dataloader: Collection[object]) -> Collection[object]:
        """Let all ranks of a replica read samples in the same order.

        Raises:
            MisconfigurationException: Replicas that wait for each other in every layer would
                evaluate different numbers of batches.
        """
        if self._engine is not None and not self.lightning_module.trainer.training:
            same = self._engine.compare_lengths(self._names.sized_len(dataloader))
            for axis in self.layout.blocked if not same else ():
                raise self.refusal(
                    f"{axis.name}_parallel_size={self.layout.size(axis.name)} makes the "
                    "replicas wait for each other in every layer, so all of them must "
                    "evaluate the same number of batches. Use a loader with a length, and a "
                    "sampler that distributes the samples evenly, such as DistributedSampler"
                )
        if self.layout.divides_model:
            replica = self.layout.replica(self.global_rank)
            read_alike(dataloader, seed_worker=partial(self._names.seed_worker, rank=replica))
        return dataloader

    def summary(self) -> StrategySummary:
        """Return a summary of the layout; collective, after ``setup``."""
        return summarize(parallel=self.parallel, mesh=self.mesh, config=self.config)

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Record the start of the batch if the layout was chosen by a forecast."""
        super().on_train_batch_start(batch, batch_idx)
        if self._forecast is not None:
            self._forecast.batch_begins()

    def on_train_end(self) -> None:
        """Compare the forecast of the layout with the measurements."""
        super().on_train_end()
        if self._forecast is not None and self.is_global_zero:
            report_forecast(self._forecast, self.lightning_module.trainer, self.root_device)

    def on_exception(self, exception: BaseException) -> None:
        """Add a memory report to an out-of-memory error, then let the layers below handle it."""
        if isinstance(exception, torch.OutOfMemoryError):
            # A failure of the report must not hide the error.
            with contextlib.suppress(Exception):
                exception.add_note(explain_memory(self))
        super().on_exception(exception)

    # ---- the end ---------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Wait for a background save, then release the gradients and the device."""
        try:
            self._release()
        finally:
            self.leave_environment()
            if self._run is not None:
                # Close it last: it still names a failing collective, such as that of a checkpoint
                # saved after the fit.
                self._run.watchdog.close()

    def _release(self) -> None:
        self.finish_saving()
        if self._engine is not None:
            with self.waiting_in("the last gathered parameters"):
                self._engine.close()
        if self._run is not None:
            self._run.interruption.leave()
        if self.lightning_module is not None and awaits_values(self.lightning_module):
            return  # setup failed before there were values: moving them would hide the reason
        super().teardown()

    def __getstate__(self) -> dict[str, object]:
        """Return the state without process groups, which cannot be copied or pickled.

        ``setup_environment`` makes new ones."""
        state = super().__getstate__()
        of_a_run = ("_run", "_parallel", "_engine", "_guard")
        saves = {"_surroundings": Surroundings(), "_saves": FolderSaves()}
        return {**state, **dict.fromkeys(of_a_run), **saves}


def strategy_class(namespace: str = "lightning.pytorch") -> type[StrategyBase]:
    """Return the strategy for one of Lightning's two namespaces.

    These are ``lightning.pytorch`` and ``pytorch_lightning``."""
    return _make_class(namespace)


@lru_cache(maxsize=2)
def _make_class(namespace: str) -> type[StrategyBase]:
    names = lightning_names(namespace)
    # pickle finds a class by its qualified name in this module.
    qualified = "PTDPStrategy" if namespace == "lightning.pytorch" else _OTHER_NAME
    body = {
        "_names": names,
        "__doc__": PTDPConfig.__doc__,
        "__module__": __name__,
        "__qualname__": qualified,
        "__init__": constructor(_PTDPStrategy.__init__, names.ParallelStrategy.__init__),
    }
    return type("PTDPStrategy", (_PTDPStrategy, names.ParallelStrategy), body)


_OTHER_NAME = "PyTorchLightningPTDPStrategy"
PTDPStrategy: Any = strategy_class()


def __getattr__(name: str) -> type[StrategyBase]:
    """Import the other namespace only when it is used."""
    if name == _OTHER_NAME:
        return strategy_class("pytorch_lightning")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
