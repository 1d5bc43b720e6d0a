"""Runs batches: straight through Lightning's own loop where nothing is cut, under a schedule where it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.context_parallel import ContextParallel
from lightning_ptdp.engine.agreement import check_same_batch, has_same_length
from lightning_ptdp.engine.batch import batch_size, iterate_tensors, microbatch_sizes, split_batch
from lightning_ptdp.engine.evaluations import check_evaluates_again, counted_evaluations, may_evaluate_again
from lightning_ptdp.engine.gradient_keeper import GradientKeeper
from lightning_ptdp.engine.gradients import check_held, check_recorded
from lightning_ptdp.engine.job import LightningJob, counted_loss, loss_and_weight, sum_over_replicas
from lightning_ptdp.engine.metric_groups import BatchMetrics, scope_metrics
from lightning_ptdp.engine.report import LogRecorder, StepReport, weigh_over_replicas, weigh_recorded
from lightning_ptdp.engine.sharing import ReportMemory, share_report
from lightning_ptdp.engine.step_state import apply_changes, find_owners
from lightning_ptdp.keyed_dropout import KeyedDropout
from lightning_ptdp.mesh import ProcessMesh
from lightning_ptdp.parallelize import ParallelModel
from lightning_ptdp.pipeline.p2p import Transport
from lightning_ptdp.pipeline.progress import Observers
from lightning_ptdp.pipeline.runtime import PipelineRuntime
from lightning_ptdp.pipeline.stage import WholeModel
from lightning_ptdp.pipeline.watchdog import Watchdog
from lightning_ptdp.random import derive_seed, seeded
from lightning_ptdp.tensor_parallel import SplitRandomness, gather_full, give_randomness
from lightning_ptdp.weight_gradients import WeightGradients

__all__ = ["Engine"]

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class Engine:
    """One rank's execution of steps.

    Args:
        module: The LightningModule, already this rank's part.
        config: The strategy's options.
        mesh: This rank's place and groups.
        parallel: What was made of the module.
        weight_gradients: Where schedules that split the backward keep what their weight gradients need.
        watchdog: Notes what this rank does.
        context_parallel: Cuts batches along time, if anything does.
        keyed_dropout: Drops the same in every layout, if anything does.
        seed: Seed of the run.
        device: This rank's device.

    Attributes:
        observers: Are told of every action, wait and reduction.
        gradients: This rank's gradients, and what the optimizer steps on.
    """

    def __init__(
        self,
        *,
        module: Any,
        config: PTDPConfig,
        mesh: ProcessMesh,
        parallel: ParallelModel,
        weight_gradients: WeightGradients,
        watchdog: Watchdog,
        context_parallel: ContextParallel | None = None,
        keyed_dropout: KeyedDropout | None = None,
        seed: int,
        device: torch.device,
    ) -> None:
        self._module, self._config, self._mesh, self._parallel = module, config, mesh, parallel
        self._seed, self._device = seed, device
        pipeline = mesh.group("pipeline")
        self._weight_gradients, self._context_parallel = weight_gradients, context_parallel
        self.observers = Observers([watchdog])
        transport = None
        if pipeline.size > 1:
            layout = mesh.layout
            transport = Transport(
                mesh=mesh,
                device=device,
                scatter=config.scatter_gather and layout.tensor_parallel_size > 1 and not layout.sequence_parallel,
                waiting=self.observers.waiting,
                explain=watchdog.explain,
            )
        cut = parallel.cut if parallel.cut is not None else WholeModel()
        self._runtime = PipelineRuntime(
            cut=cut,
            transport=transport,
            rank=pipeline.rank,
            ranks=pipeline.ranks,
            weight_gradients=weight_gradients,
            observer=self.observers,
        )
        self._keyed_dropout = keyed_dropout
        self._randomness = keyed_dropout or SplitRandomness(rank=mesh.group("tensor").rank, device=device)
        self._take_randomness = self._give_randomness()
        self._memory = ReportMemory()
        self._owners, self._metrics = find_owners(module), BatchMetrics(module, mesh.group("context"))
        self.gradients = GradientKeeper(
            module=module, config=config, mesh=mesh, parallel=parallel, observers=self.observers, device=device
        )
        self._factor: float | Tensor = 1.0
        self._compared = False
        self._replicas_in_step = mesh.group("replicas").size > 1
        self._unscope = scope_metrics(module, mesh) if mesh.layout.model_parallel_size > 1 else lambda: None

    def prepare_gradients(self, optimizer: Any, *, overlaps: bool = False) -> None:
        """Make what keeps and sums gradients, and give the optimizer what it steps on.

        Raises:
            ValueError: The module has trainable parameters that were not there when it was cut, or the optimizer one that it has not;
                names them. Or the optimizer needs more than a rank has.
        """
        check_recorded(self._module, self._parallel)
        for child in self._module.modules():
            if "weight_gradients" in vars(child):
                child.weight_gradients = self._weight_gradients
        apart = self._mesh.layout.world_size > 1 or self._config.runs_backward
        if apart:
            check_held(optimizer, self._parallel)
        self.gradients.prepare(optimizer, apart=apart, overlaps=overlaps)
        if isinstance(optimizer, torch.optim.LBFGS):
            self._check_evaluates_again(optimizer)

    def evaluations(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of a step, for ``optimizer`` to call."""
        if not may_evaluate_again(optimizer):
            return closure
        return counted_evaluations(closure, agree=self._agreed, again=partial(self._check_evaluates_again, optimizer))

    def _check_evaluates_again(self, optimizer: Any) -> None:
        check_evaluates_again(optimizer, self._mesh.layout, steps_on_copies=self.gradients.stepped is not None)

    def _agreed(self, loss: Tensor) -> Tensor:
        return sum_over_replicas(self.scaled(loss).detach().clone(), self._mesh.group("replica_sum"))

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss of a step with this replica's weight in the mean over replicas."""
        if self._mesh.group("replica_sum").size == 1:
            return loss
        return loss * self._factor if isinstance(self._factor, float) else counted_loss(loss, self._factor) * self._factor

    def close(self) -> None:
        """Detach from the module."""
        self.gradients.close()
        self._unscope()
        self._take_randomness()

    def _give_randomness(self) -> Callable[[], None]:
        if self._keyed_dropout is not None:
            undo = contextlib.ExitStack()
            undo.callback(give_randomness(self._module, self._keyed_dropout))
            undo.callback(self._keyed_dropout.attach(self._module))
            return undo.close
        layout, split = self._mesh.layout, self._parallel.split_blocks
        if layout.tensor_parallel_size == 1 or (layout.sequence_parallel and split is None):
            return lambda: None
        blocks = None if split is None else self._module.get_submodule(split)
        return give_randomness(self._module, self._randomness, blocks=blocks)

    # ---- training -----------------------------------------------------------------------------------------------------

    def training_step(self, context: Context, args: Sequence[Any], *, clears: bool, loss_scale: float = 1.0) -> Any:
        """One batch of one replica.

        Args:
            context: The precision plugin's context for one call of the user's step.
            args: What Lightning passes to ``training_step``, the batch first.
            clears: Lightning will clear all gradients before the backward.
            loss_scale: Factor on the losses of a schedule's backwards, which the optimizer's gradients keep.
        """
        self._compare_batch(args[0])
        self.gradients.begin(clears=clears)
        if self._config.runs_backward:
            return self._scheduled_training_step(context, args, loss_scale)
        return self._straight_training_step(context, args)

    def _straight_training_step(self, context: Context, args: Sequence[Any]) -> Any:
        group, recorder = self._mesh.group("replica_sum"), LogRecorder(self._module)
        recording = recorder if group.size > 1 else contextlib.nullcontext()
        with self._step_randomness(), context(), self._same_dropout(args[0]), recording:
            output = self._module.training_step(*args)
        if self._config.check_finite is not None:
            loss, tokens = loss_and_weight(output)
            self.gradients.losses = [(loss if tokens is None else counted_loss(loss, tokens)).detach()]
        if group.size > 1:
            _, tokens = loss_and_weight(output)
            self._factor = 1 / group.size
            if tokens is not None:
                self._factor = tokens / weigh_recorded(recorder.calls, tokens, group=group).clamp(min=1).to(tokens.dtype)
        recorder.replay()
        return output

    def _scheduled_training_step(self, context: Context, args: Sequence[Any], loss_scale: float) -> Any:
        buckets, windows = self.gradients.start(), self._module.trainer.accumulate_grad_batches
        # Batches that weigh their tokens differently are scaled one by one, so their gradients cannot be reduced while they grow.
        reduces = not self.gradients.accumulates and not buckets.has_stash
        job = self._job(
            "training_step",
            context,
            args,
            buckets=buckets,
            scale=1 / (windows * self._mesh.group("replica_sum").size),
            loss_scale=loss_scale,
            reduce_gradients=reduces,
            may_skip=self._mesh.layout.world_size == 1,
        )
        self._runtime.run(self._schedule(job.count, training=True), job)
        report = self._shared_report(job, weigh=self._mesh.group("replica_sum").size > 1)
        self.gradients.losses = job.losses
        scale = 1 / (report.weight * windows) if report.counted and report.weight else None
        self._factor = 1 / self._mesh.group("replica_sum").size
        self.gradients.settle(reduced=reduces, counted=report.counted, scale=scale)
        self._replay(report)
        if job.skipped:
            self.gradients.install()  # Lightning will not run the backward; those of the batches before stay
            return None
        return self._training_output(report)

    def _training_output(self, report: StepReport) -> Any:
        mean = report.loss / report.weight if report.weight else 0.0
        loss = torch.tensor(mean, dtype=torch.float32, device=self._device)
        if not report.counted and report.extras is None:
            return loss
        counted = {"num_tokens": torch.tensor(report.weight).to(torch.int64)} if report.counted else {}
        return {**(report.extras or {}), **counted, "loss": loss}

    # ---- evaluation ---------------------------------------------------------------------------------------------------

    def evaluation_step(self, hook: str, context: Context, args: Sequence[Any]) -> Any:
        """``validation_step``, ``test_step`` or ``predict_step`` on one batch; never touches gradients."""
        self.gradients.parameters_needed()
        if self._mesh.group("pipeline").size == 1 and self._context_parallel is None:
            return self._straight_evaluation_step(hook, context, args)
        job = self._job(hook, context, args)
        self._runtime.run(self._schedule(job.count, training=False), job)
        report = self._shared_report(job, weigh=self._replicas_in_step and hook != "predict_step")
        self._replay(report)
        return report.extras

    def _straight_evaluation_step(self, hook: str, context: Context, args: Sequence[Any]) -> Any:
        recorder, weigh = LogRecorder(self._module), self._replicas_in_step and hook != "predict_step"
        with context(), recorder if weigh else contextlib.nullcontext():
            output = gather_full(getattr(self._module, hook)(*args))
        if weigh and isinstance(output, Mapping) and output.get("num_tokens") is not None:
            tokens = torch.as_tensor(output["num_tokens"], dtype=torch.float32, device=self._device)
            weigh_recorded(recorder.calls, tokens, group=self._mesh.group("replica_sum"))
        recorder.replay()
        return output

    def compare_lengths(self, loader: Any) -> None:
        """Whether the replicas evaluate equally many batches, so that they may speak after each; collective over the replicas."""
        self._replicas_in_step &= has_same_length(loader, group=self._mesh.group("replicas"), device=self._device)

    # ---- shared -------------------------------------------------------------------------------------------------------

    def _job(self, hook: str, context: Context, args: Sequence[Any], **training: Any) -> LightningJob:
        batch = args[0]
        sizes: tuple[int, ...]
        try:
            samples = batch_size(batch)
        except ValueError:
            if hook == "training_step":
                raise
            samples = 1  # an evaluation batch that cannot be cut is run whole
            microbatches, sizes = [batch], (1,)
        else:
            sizes = microbatch_sizes(samples, self._config.microbatches(samples))
            microbatches = split_batch(batch, sizes)
        return LightningJob(
            module=self._module,
            hook=hook,
            microbatches=microbatches,
            sizes=sizes,
            arguments=args[1:],
            context=context,
            seed=self._step_seed(hook),
            device=self._device,
            context_parallel=self._context_parallel,
            randomness=self._randomness,
            keyed_dropout=self._keyed_dropout,
            stages=self._mesh.layout.num_stages,
            metrics=self._metrics,
            owners=self._owners,
            attending=[stage for stage, (start, stop) in enumerate(self._parallel.ranges or [(0, 1)]) if start < stop],
            **training,
        )

    def _schedule(self, microbatches: int, *, training: bool) -> Any:
        return self._config.build_schedule(microbatches, training=training)

    def _shared_report(self, job: LightningJob, *, weigh: bool) -> StepReport:
        pipeline, replicas = self._mesh.group("pipeline"), self._mesh.group("replica_sum")
        report = None
        last = self._mesh.layout.last_stage_rank
        if pipeline.rank == last:
            report = job.report()
            if report.counted and weigh:
                weigh_over_replicas(report, group=replicas, device=self._device)
        shared = share_report(report, group=pipeline, source=last, memory=self._memory, device=self._device)
        if report is None:
            apply_changes(self._module, shared.changes)
        return shared

    def _replay(self, report: StepReport) -> None:
        for call in report.calls:
            if call.metric is not None:
                self._module.log(call.name, self._module.get_submodule(call.metric), **call.options)
            else:
                self._module.log(call.name, torch.tensor(call.value, dtype=torch.float32, device=self._device), **call.options)

    def _step_seed(self, hook: str) -> tuple[object, ...]:
        layout, rank = self._mesh.layout, self._mesh.rank
        at, replica = layout.coordinates(rank), layout.replica(rank)
        tensor = at["tensor"] if layout.sequence_parallel and self._parallel.split_blocks is None else 0
        step = self._module.trainer.fit_loop.epoch_loop.total_batch_idx if hook == "training_step" else 0
        # Each slice of the sequence has activations of its own, and needs random numbers of its own.
        return (self._seed, hook, step, replica, tensor, *([at["context"]] if self._context_parallel else []))

    @contextlib.contextmanager
    def _step_randomness(self) -> Iterator[None]:
        """With other ranks around, random numbers may not depend on what this process happened to draw before."""
        if self._mesh.layout.world_size == 1:
            yield
            return
        self._randomness.begin()
        with seeded(derive_seed(*self._step_seed("training_step"), 0, 0), self._device):
            yield

    def _same_dropout(self, batch: Any) -> contextlib.AbstractContextManager[None]:
        if self._keyed_dropout is None:
            return contextlib.nullcontext()
        step = self._step_seed("training_step")[1:3]
        return self._keyed_dropout.forward(batch, tensors=iterate_tensors(batch), samples=batch_size(batch), step=step)

    def _compare_batch(self, batch: Any) -> None:
        """Once a fit: all ranks of a replica must read the same samples."""
        if not self._compared:
            check_same_batch(batch, group=self._mesh.group("model"), rank=self._mesh.rank, device=self._device)
            self._compared = True
