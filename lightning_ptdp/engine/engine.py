"""Engine: runs batches through Lightning's loop, or under a schedule if the model is cut."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.base.nested import Nested, batch_size
from lightning_ptdp.base.random import derive_seed
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel import ReplicaBuffers
from lightning_ptdp.engine.copy_comparison import CopyComparison
from lightning_ptdp.engine.decoding import Decoding
from lightning_ptdp.engine.metric_groups import BatchMetrics, scope_metrics
from lightning_ptdp.engine.microbatches import microbatch_sizes, split_batch
from lightning_ptdp.engine.optimization import Optimization
from lightning_ptdp.engine.rank_agreement import RankAgreement
from lightning_ptdp.engine.replica_step import (
    LightningJob,
    counted_loss,
    loss_and_weight,
    num_tokens,
)
from lightning_ptdp.engine.sharing import ReportSharing
from lightning_ptdp.engine.step_inspection import BatchInspection, FirstBatchInspection
from lightning_ptdp.engine.step_loggers import StepLoggers, repeat
from lightning_ptdp.engine.step_report import (
    LogCall,
    LogRecorder,
    ReportStream,
    StepReport,
    count_of,
    replay,
    weigh_over_replicas,
)
from lightning_ptdp.engine.step_state import apply_changes, find_owners
from lightning_ptdp.forward.surroundings import Context, Forward, Surroundings
from lightning_ptdp.parallel_model import ParallelModel
from lightning_ptdp.pipeline.p2p import Transport
from lightning_ptdp.pipeline.program_observers import Observers
from lightning_ptdp.pipeline.runtime import PipelineRuntime
from lightning_ptdp.pipeline.watchdog import OTHER_REPLICAS, Watchdog
from lightning_ptdp.shims.lightning import LightningModule
from lightning_ptdp.shims.torch import sharing_casts
from lightning_ptdp.shims.transformers import image_token_of
from lightning_ptdp.tensor_parallel import gather_full
from lightning_ptdp.world.mesh import ProcessMesh

MakesContext = Callable[[], Context]


class Engine:
    """One rank's execution of steps.

    Args:
        config: The strategy's options.
        mesh: This rank's place and groups.
        parallel: The LightningModule, already reduced to this rank's part.
        surroundings: Context managers around a forward.
        watchdog: Notes the actions of this rank.
        seed: Seed of the run.
        device: This rank's device.

    Attributes:
        observers: Receive an event for every action, wait and reduction.
        optimization: This rank's gradients, their checks, and the weight of its loss.
        gradients: Those of ``optimization``.
        agreement: Facts about a batch on which the ranks agree before its step.
    """

    def __init__(
        self,
        *,
        config: PTDPConfig,
        mesh: ProcessMesh,
        parallel: ParallelModel,
        surroundings: Surroundings,
        watchdog: Watchdog,
        seed: int,
        device: torch.device,
    ) -> None:
        module: LightningModule = parallel.module
        self._module = module
        self._config = config
        self._mesh = mesh
        self._parallel = parallel
        self._seed = seed
        self._device = device
        pipeline = mesh.group("pipeline")
        self._surroundings = surroundings
        self._detach = surroundings.attach(module)
        self._watchdog = watchdog
        self.observers = Observers([watchdog])
        transport = None
        if pipeline.size > 1:
            transport = Transport(
                mesh=mesh,
                device=device,
                scatter=config.scatter_gather
                and mesh.group("tensor").size > 1
                and not config.sequence_parallel,
                waiting=self.observers.waiting,
                explain=watchdog.explain,
            )
        self._runtime = PipelineRuntime(
            cut=parallel.cut,
            transport=transport,
            group=pipeline,
            surroundings=surroundings,
            observer=self.observers,
            adds_consecutive=config.adds_consecutive,
        )
        self._image_token = image_token_of(module)
        self._stream = ReportStream(device)
        self._sharing = ReportSharing(
            pipeline, source=mesh.layout.last_stage_rank, stream=self._stream
        )
        self._loggers = StepLoggers(module, mesh)
        self._follow_metrics()
        self.optimization = Optimization(
            config=config, mesh=mesh, parallel=parallel, observers=self.observers, device=device
        )
        self.gradients = self.optimization.gradients
        self._buffers = ReplicaBuffers(module, mesh.group("replica_sum"))
        self._copies = CopyComparison(
            mesh=mesh,
            parallel=parallel,
            gradients=self.gradients,
            device=device,
            shards_optimizer=config.shards_optimizer,
        )
        self.agreement = RankAgreement(
            mesh=mesh,
            sizes=self._sizes,
            device=device,
            joined_by=config.option_that_joins(mesh.layout, training=True),
        )
        self._inspection = FirstBatchInspection(
            config=config, mesh=mesh, module=module, owners=self._owners
        )
        self._accumulated = False  # the previous batch did not complete an optimizer step
        self._replicas_in_step = mesh.group("replicas").size > 1

    def _follow_metrics(self) -> None:
        """Share the states of the module's current metrics; hooks may have made new ones."""
        self._owners = find_owners(self._module)
        self._metrics = BatchMetrics(self._module, self._mesh.group("context"))
        self._unscope = (
            scope_metrics(self._module, self._mesh, self._metrics.is_of_samples)
            if self._mesh.layout.divides_model
            else lambda: None
        )

    def _begin_batch(self, args: Sequence[Nested]) -> None:
        is_first = len(args) == 1 or 0 in args[1:]
        if is_first and not self._metrics.has_all(self._module):
            self._unscope()
            self._follow_metrics()

    def close(self) -> None:
        """Detach from the module."""
        self.optimization.close()
        self._unscope()
        self._detach()

    # ---- training --------------------------------------------------------------------------------

    def training_step(
        self,
        context: MakesContext,
        args: Sequence[Nested],
        *,
        clears: bool,
        loss_scale: Tensor | float = 1.0,
    ) -> Nested:
        """Run one batch of one replica.

        Args:
            context: The precision plugin's context for one call of the user's step.
            args: Arguments of ``training_step`` from Lightning, the batch first.
            clears: True if Lightning will clear all gradients before the backward.
            loss_scale: Factor on the losses of a schedule's backwards. The gradients are not
                divided by it here.
        """
        self._begin_batch(args)
        if not self._accumulated:
            self.broadcast_buffers()
        self._accumulated = self.gradients.accumulates
        self._copies.check(self._step("training_step"))
        self.gradients.clears = clears
        self.gradients.guard()
        output = (
            self._scheduled_training_step(context, args, loss_scale)
            if self._config.runs_backward
            else self._straight_step("training_step", context, args)
        )
        # Gathers come before reductions on every rank, and steps before Lightning clears gradients.
        self.gradients.parameters_needed()
        return output

    def broadcast_buffers(self) -> None:
        """Broadcast the first replica's buffers to all replicas, if the option is set.

        The call is collective over the replicas.
        """
        if self._config.broadcast_buffers:
            self._buffers.broadcast()

    def _scheduled_training_step(
        self, context: MakesContext, args: Sequence[Nested], loss_scale: Tensor | float
    ) -> Nested:
        store = self.gradients.start()
        windows = self._module.trainer.accumulate_grad_batches
        replicas = self._mesh.group("replica_sum").size
        job = self._job(
            "training_step",
            context,
            args,
            gradients=store,
            before_backward=self.gradients.parameters_needed,
            scale=1 / (windows * replicas),
            loss_scale=loss_scale,
            reduces=self.gradients.reduces,
            may_skip=self._mesh.layout.world_size == 1,
        )
        if self._mesh.layout.world_size == 1:
            job.spread = self.agreement.collect_alone(args[0], job.sizes)
        job.expected_tokens = _power_above(self.agreement.expected_tokens * replicas * windows)
        warn_of_writes = self._inspection.begin(job, args[0])
        report = self._run(job, "training_step")
        warn_of_writes()
        self.agreement.note_spread(report.spread)
        self.agreement.warn_of_uneven(args[0], counted=report.counted)
        self.optimization.losses = job.losses
        scale = (
            job.expected_tokens / (report.weight * windows)
            if report.counted and report.weight
            else None
        )
        self.optimization.factor = 1 / replicas
        with self._watchdog.counting(OTHER_REPLICAS):
            counted = None if job.skipped else report.counted
            self.gradients.finish(counted=counted, scale=scale)
        if job.skipped:
            # Lightning will not run the backward; the gradients of the earlier batches stay.
            self.gradients.set_grad()
            return None
        return self._training_output(report)

    def _training_output(self, report: StepReport) -> Nested:
        mean = report.loss / report.weight if report.weight else 0.0
        loss = torch.tensor(mean, dtype=torch.float32).to(self._device, non_blocking=True)
        if not report.counted and report.extras is None:
            return loss
        counts = {"num_tokens": count_of(float(report.weight))} if report.counted else {}
        return {**(report.extras or {}), **counts, "loss": loss}

    # ---- evaluation ------------------------------------------------------------------------------

    def evaluation_step(self, hook: str, context: MakesContext, args: Sequence[Nested]) -> Nested:
        """Run ``validation_step``, ``test_step`` or ``predict_step`` on one batch.

        Gradients are never changed.
        """
        self._begin_batch(args)
        self.gradients.parameters_needed()
        if not self._config.cuts_forward:
            with self._parallel.computing():
                return self._straight_step(hook, context, args)
        return self._run(self._job(hook, context, args), hook).extras

    def decode(
        self,
        context: MakesContext,
        call: Callable[[int], Tensor],
        choose: Callable[[Tensor], Tensor],
        *,
        rows: int,
        key: Hashable,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the result of one forward, a vector of ``rows`` values, on all ranks of a replica.

        See ``Decoding``.
        """
        self.gradients.parameters_needed()
        decoding = Decoding(call=call, choose=choose, key=key, context=context, dtype=dtype)
        # Compiled code would be compiled again for every length.
        eager = (
            contextlib.nullcontext()
            if self._config.compile == "none"
            else torch.compiler.set_stance("force_eager")
        )
        with eager, self._parallel.computing(forward=True):
            schedule = self._config.build_schedule(1, training=False)
            return decoding.run(
                self._runtime, schedule, rows=rows, mesh=self._mesh, device=self._device
            )

    def compare_lengths(self, length: int | None, samples: int | None) -> bool:
        """Return True if the replicas evaluate the same numbers of batches and microbatches.

        With the same number of batches they may communicate after each batch. Collective over the
        replicas.

        Args:
            length: This rank's number of batches; None if its loader has no length.
            samples: Number of samples in these batches; None if it is unknown.
        """
        equal = self.agreement.is_same_length(length)
        self._replicas_in_step &= equal
        one_each = not self._config.cuts_forward
        return (self.agreement.is_same_length(samples or 0) or one_each) and equal

    def _sizes(self, batch: Nested) -> tuple[int, ...]:
        """Return the numbers of samples in the microbatches."""
        samples = batch_size(batch)
        return microbatch_sizes(samples, self._config.microbatches(samples))

    # ---- shared ----------------------------------------------------------------------------------

    def _straight_step(self, hook: str, context: MakesContext, args: Sequence[Nested]) -> Nested:
        """Run the user's step on the full batch; a backward is left to Lightning."""
        training = hook == "training_step"
        manual = self.optimization.manual if training else None
        averages = self._weighs(hook)
        inspection = None
        if training and manual is None:
            inspection = self._inspection.undivided(args[0])
        recorder = LogRecorder(self._module)
        forward = Forward(
            hook=hook,
            step=self._step(hook),
            full_batch=args[0],
            seed=self._straight_seed(hook, args),
        )
        with (
            self._surroundings.around(forward),
            context(),
            recorder if averages else contextlib.nullcontext(),
            self._loggers.replaced(is_last=True),
            contextlib.nullcontext() if inspection is None else inspection.watched(),
        ):
            output = getattr(self._module, hook)(forward.batch, *args[1:])
        if manual is not None:
            manual.check()
        tokens = None
        if not training:
            output = gather_full(output)
            tokens = num_tokens(output)
        elif averages or self._config.check_finite is not None:
            tokens = self._note_loss(output, args[0], inspection)
        factor: float | Tensor = 1 / self._mesh.group("replica_sum").size
        if averages:
            # Replicas that read other parameters have not started the same gathers yet.
            self.gradients.parameters_needed()
            self._check_counted((hook, *args[2:]), tokens is not None)
        if averages and tokens is not None:
            factor = self._weigh_calls(recorder.calls, tokens)
        if training:
            self.optimization.factor = factor
        replay(recorder.calls, self._module, shared=True)
        return output

    def _straight_seed(self, hook: str, args: Sequence[Nested]) -> int | None:
        """Return the seed of a straight step; None: it draws from the process's generators.

        With other ranks, random numbers must not depend on this process's earlier draws.
        """
        layout = self._mesh.layout
        if layout.world_size == 1:
            return None
        return derive_seed(*self._step_seed(hook, args), layout.replica(self._mesh.rank))

    def _note_loss(
        self, output: Nested, batch: Nested, inspection: BatchInspection | None
    ) -> Tensor | None:
        """Keep the loss of a straight step, warn of it, and return its number of tokens."""
        loss, tokens = loss_and_weight(output)
        if tokens is None and inspection is not None:
            inspection.check_loss(loss, batch)
        self.agreement.warn_of_uneven(batch, counted=tokens is not None)
        self.optimization.losses = [counted_loss(loss, tokens).detach()]
        return tokens

    def _weigh_calls(self, calls: list[LogCall], tokens: Tensor) -> Tensor:
        """Average a straight step's logged values over replicas, weighted by tokens.

        Returns:
            This replica's share of the tokens.
        """
        tokens = tokens.to(self._device, torch.float32)
        with self._watchdog.counting(OTHER_REPLICAS):
            total, _ = weigh_over_replicas(calls, tokens, group=self._mesh.group("replica_sum"))
        # Tokens may be counted by weights, whose sum may be less than 1.
        return torch.where(total > 0, tokens / total, 0.0).to(tokens.dtype)

    def _run(self, job: LightningJob, hook: str) -> StepReport:
        """Run the user's step, including its backward, under a schedule.

        The logged values are passed to Lightning.
        """
        # Weights are cast once for all microbatches, with two exceptions: the copies would outlive
        # gathered parameters, and "full" recomputation is chosen to save memory.
        casts: Context = contextlib.nullcontext()
        if self._config.recompute != "full" and self._config.shard != "parameters":
            casts = self._parallel.casts.kept()
            job.context = partial(sharing_casts, job.context)
        with self._parallel.computing(), casts:
            self._runtime.run(self._config.build_schedule(job.count, training=job.training), job)
        is_last = self._mesh.group("pipeline").rank == self._mesh.layout.last_stage_rank
        sent = job.report() if is_last else None
        trainer = self._module.trainer
        if sent is not None and self._mesh.group("context").size == 1:
            sent.stops |= trainer.should_stop  # a hook of the last backward may have set it
        with self._watchdog.counting("the last stage"):
            report = self._sharing.share(sent)
        if sent is None:
            apply_changes(self._module, report.changes)
        trainer.should_stop |= report.stops
        # The ranks of a replica have the same report.
        replay(report.calls, self._module, shared=self._mesh.layout.num_replicas > 1)
        if self._mesh.rank == 0:
            repeat(report.logger_calls, trainer.loggers)
        return report

    def _check_counted(self, key: Hashable, counted: bool) -> None:
        # Steps often return nothing in the sanity check.
        stage = self._module.trainer.state.stage
        with self._watchdog.counting(OTHER_REPLICAS):
            self.agreement.check_counted((stage, key), counted)

    def _weigh(self, key: Hashable, report: StepReport) -> None:
        """Replace the numbers of this replica with those of all replicas, if tokens are counted."""
        self._check_counted(key, report.counted)
        if not report.counted:
            return
        assert isinstance(report.weight, Tensor)
        with self._watchdog.counting(OTHER_REPLICAS):
            report.weight, report.loss = weigh_over_replicas(
                report.calls, report.weight, report.loss, group=self._mesh.group("replica_sum")
            )

    def _weighs(self, hook: str) -> bool:
        """Return True if this step's logged values are averaged over replicas by token count."""
        if hook == "training_step":
            return self._mesh.group("replica_sum").size > 1 and self.optimization.manual is None
        return self._replicas_in_step and hook != "predict_step"

    def _job(
        self, hook: str, context: MakesContext, args: Sequence[Nested], **training: Any
    ) -> LightningJob:
        try:
            sizes = self._sizes(args[0])
            microbatches = split_batch(args[0], sizes, image_token=self._image_token)
        except ValueError:
            if hook == "training_step":
                raise
            # An evaluation batch that cannot be split runs whole.
            sizes = (1,)
            microbatches = [args[0]]
        return LightningJob(
            module=self._module,
            hook=hook,
            microbatches=microbatches,
            sizes=sizes,
            arguments=args[1:],
            context=context,
            step=self._step(hook),
            seed=self._step_seed(hook, args),
            shards=self._parallel.shards,
            replica=self._mesh.layout.replica(self._mesh.rank),
            device=self._device,
            stages=self._mesh.layout.num_stages,
            metrics=self._metrics,
            owners=self._owners,
            loggers=self._loggers,
            stream=self._stream,
            weigh=partial(self._weigh, (hook, *args[2:])) if self._weighs(hook) else None,
            **training,
        )

    def _step(self, hook: str) -> int:
        if hook == "training_step":
            return self._module.trainer.fit_loop.epoch_loop.total_batch_idx
        return 0

    def _step_seed(self, hook: str, args: Sequence[Nested]) -> tuple[object, ...]:
        # The batch index of an evaluation, and the index of its loader.
        batches = [number for number in args[1:] if isinstance(number, int)]
        return (self._seed, hook, *([self._step(hook)] if hook == "training_step" else batches))


def _power_above(number: float) -> float:
    """Return the least power of two that is not below ``number``; division by it is exact."""
    return 2.0 ** math.ceil(math.log2(max(number, 1)))
