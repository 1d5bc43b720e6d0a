"""Set-up of a run: division of the module, initial values, optimizer and gradient buckets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from functools import partial
from itertools import chain

import torch
from torch import nn
from torch.utils.data import RandomSampler

from lightning_ptdp.checkpoint import same_outcome
from lightning_ptdp.data_parallel import check_elementwise, reads_between_steps
from lightning_ptdp.engine import Engine
from lightning_ptdp.forward.surroundings import Context
from lightning_ptdp.parallelize import apply_block_passes, parallelize
from lightning_ptdp.parameters.materialize import awaits_values
from lightning_ptdp.parameters.structure_copies import UncutView
from lightning_ptdp.pipeline.discover import KnownParts
from lightning_ptdp.shims.lightning import (
    Trainer,
    count_replicas,
    fits,
    keep_model_summary,
    keep_samplers,
)
from lightning_ptdp.shims.peft import set_magnitudes
from lightning_ptdp.strategy.checks.model import (
    CUT_MARK,
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
from lightning_ptdp.strategy.checks.trainer import check_trainer
from lightning_ptdp.strategy.checks.trials import check_optimizer_state
from lightning_ptdp.strategy.forward_contexts import make_surroundings
from lightning_ptdp.strategy.optimizers import renew_parameters, settle_groups
from lightning_ptdp.strategy.parameter_guard import ParameterGuard
from lightning_ptdp.strategy.precision import convert, prepare_loss_scaling
from lightning_ptdp.strategy.restoring import load_initial_weights, needs_initial_values
from lightning_ptdp.strategy.steps import StepHooks


class SetupHooks(StepHooks):
    """Layer of the strategy: the module, the optimizer and the data of this rank."""

    model: nn.Module
    _known_parts: KnownParts | None = None

    def tensor_init_context(self, empty_init: bool | None = None) -> Context:
        """Return the context in which modules are created.

        They are created on the CPU (or, in ``configure_model``, on the meta device) and moved in
        ``setup``."""
        return self.precision_plugin.tensor_init_context()

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
        if self.layout.num_replicas == 1:
            keep_samplers(trainer)
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
            # configure_optimizers may have added some
            with self.waiting_in("comparing hooks on gradients"):
                check_hooks_before_sums(self.model, self.config, self.layout)
            self._prepare_optimization(trainer)
        self.setup_precision_plugin()
        if fitting:
            self._names.optimizers_to_device(self.optimizers, self.root_device)
            self._follow_switches()

    def _parallelize(self) -> None:
        module = self.lightning_module
        if self.layout.divides_model and CUT_MARK in vars(module):
            check_model(module, self.config, self.layout)
        # without model parallelism the module has not been built before launch
        check_quantized(module, self.config, self.layout)
        with self.waiting_in("comparing the model and the data of all ranks"):
            check_same_training(module)
        built_without_values = awaits_values(module)
        with same_outcome("reading the headers of the initial weights"):
            weights = open_initial_weights(module) if self.config.meta_init else None
        self._parallel = parallelize(
            module,
            convert=self._convert,
            plan=partial(plan_of, config=self.config),
            mesh=self.mesh,
            config=self.config,
            seed=self.run.seed,
            device=self.root_device,
            left=() if weights is None else weights.names,
            known=self._known_parts,
        )
        if self.layout.divides_model:
            module.__dict__[CUT_MARK] = self.layout.describe()
            self._guard = ParameterGuard(
                module, self.parallel.parameters, self.layout, refuse=self._alone
            )
        self._surroundings = make_surroundings(self)
        self._parallel = apply_block_passes(
            self.parallel,
            config=self.config,
            mesh=self.mesh,
            surroundings=self._surroundings,
            device=self.root_device,
        )
        # a checkpoint has all of the values
        resumes = (
            module.trainer.ckpt_path is not None
            and module.strict_loading
            and not needs_initial_values(module)
        )
        if weights is not None and not resumes:
            load_initial_weights(self.model_space, weights)
        if built_without_values:
            with self._parallel.computing():
                set_magnitudes(module)

    def _convert(self) -> None:
        self.model = convert(self)
        check_max_norm(self.model, self.layout)
        if fits(self.lightning_module.trainer) and self.is_global_zero:
            warn_of_batch_norm(self.model, self.config, self.layout)
            warn_of_balance_losses(self.model, self.config, self.layout)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizer with the parameter groups of the uncut model.

        There is one optimizer, except under manual optimization."""
        parallel = self.parallel
        parameters = self.parallel.parameters
        for managed in parameters.values():
            managed.is_undivided = False
        view = (
            contextlib.nullcontext(({}, {}))
            if parallel.uncut is None
            else self._uncut_view(parallel.uncut)
        )
        with view as (foreign, by_name):
            self._make_optimizers(trainer)
        for optimizer in self.optimizers:
            renew_parameters(optimizer, by_name)
        # before the groups are checked, which does not name parameters
        parallel.check(frozen=self.layout.divides_model)
        with self.waiting_in("comparing the optimizer's parameter groups"):
            trials = settle_groups(self, foreign)
        for optimizer, groups in zip(self.optimizers, trials, strict=True):
            undivided = check_elementwise(optimizer, groups, device=self.root_device)
            for parameter in chain.from_iterable(
                optimizer.param_groups[position]["params"] for position in undivided
            ):
                if parameter in parameters:
                    parameters[parameter].is_undivided = True
            if trainer.checkpoint_callbacks and not self.writes_file:
                check_optimizer_state(
                    optimizer, groups, undivided=undivided, device=self.root_device
                )
        if parallel.shards is not None:
            parallel.shards.keep_undivided()

    def _uncut_view(
        self, view: UncutView
    ) -> contextlib.AbstractContextManager[tuple[dict[nn.Parameter, str], dict[str, nn.Parameter]]]:
        """Return a context in which the module looks uncut."""
        parameters = self.parallel.parameters
        pipeline = self.mesh.group("pipeline")
        trained = {managed.name: p.requires_grad for p, managed in parameters.items()}
        if pipeline.size > 1:  # stages may have frozen parameters since the cut
            with self.waiting_in("exchanging the names of frozen parameters"):
                ranks = pipeline.gather(trained)
            trained = {name: trains for rank in ranks for name, trains in rank.items()}
        return view.inserted(parameters, trained=trained, device=self.root_device)

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
        self.snapshots.begin(trainer)
        for managed in self.parallel.parameters.values():
            managed.step_on(managed.parameter)
        self._named_groups = self.model_space.names_of_groups()
        prepare_loss_scaling(self)
        if not self.lightning_module.automatic_optimization:
            self.engine.optimization.prepare_manual()
            # Autograd makes the gradients, which are averaged over the replicas. The optimizers are
            # the user's.
            return
        (optimizer,) = self.optimizers
        defers = self.config.overlap_parameter_gather and not reads_between_steps(
            trainer, self._names
        )
        self.engine.optimization.prepare(optimizer, defers=defers)

    def _follow_switches(self) -> None:
        """Let the model's parameters follow optimizers that exchange the weights."""
        for optimizer in (*self.optimizers, *self._lightning_optimizers):
            for name in ("train", "eval"):
                if callable(switch := getattr(optimizer, name, None)):
                    vars(optimizer)[name] = partial(self._rewrite, switch)

    def _rewrite(self, switch: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Run a switch of Schedule-Free's optimizers, which evaluate at the average of the weights.

        See arXiv 2405.15682, section 2."""
        with self.waiting_in("exchanging the weights"), self.engine.gradients.rewritten():
            return switch(*args, **kwargs)

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
            sized_len = self._names.sized_len
            batches = getattr(dataloader, "batch_sampler", None)
            equal = self._engine.compare_lengths(
                sized_len(dataloader), sized_len(getattr(batches, "sampler", None))
            )
            option = self.config.option_that_joins(self.layout, training=False)
            if option and not equal:
                raise self.refusal(
                    f"{option} makes the replicas wait for each other in every layer, so all of "
                    "them must evaluate the same number of batches, of the same sizes. Use a "
                    "loader with a length, and a sampler that distributes the samples evenly, such "
                    "as DistributedSampler"
                )
        if self.layout.divides_model:
            replica = self.layout.replica(self.global_rank)
            read_in_same_order(
                dataloader, seed_worker=partial(self._names.seed_worker, rank=replica)
            )
        return dataloader


# ---- One order of samples in every layout --------------------------------------------------------


def read_in_same_order(dataloader: object, *, seed_worker: Callable[[int], None]) -> None:
    """Let all ranks of a replica read the same samples in the same order.

    ``seed_worker`` seeds a worker of the loader by its number and the replica. Lightning would seed
    each rank's workers differently."""
    sampler = getattr(dataloader, "sampler", None)
    if isinstance(sampler, RandomSampler):
        _draw_like_replicas(sampler)
    unseeded = getattr(dataloader, "worker_init_fn", 0) is None
    if unseeded and os.getenv("PL_SEED_WORKERS", "0") == "1":
        vars(dataloader)["worker_init_fn"] = seed_worker


def _draw_like_replicas(sampler: RandomSampler) -> None:
    """Let a random sampler without a generator draw the order of ``DistributedSampler``.

    Lightning gives that sampler to replicas; its order depends on the seed of ``seed_everything``
    and on the epoch. Without a generator the sampler would draw from the process's random state,
    which pipeline stages consume differently."""
    if sampler.generator is not None:
        return
    sampler.generator = torch.Generator()
    # Lightning seeds its own sampler in the same way, and calls ``set_epoch`` if a sampler has it.
    begin = partial(_begin, sampler.generator, int(os.getenv("PL_GLOBAL_SEED", "0")))
    vars(sampler)["set_epoch"] = begin
    begin(0)


def _begin(generator: torch.Generator, seed: int, epoch: int) -> None:
    generator.manual_seed(seed + epoch)
