"""One step of one replica: the user's step on each microbatch, one report for Lightning.

The microbatches run in the order of the schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_ptdp.base.nested import Nested, map_tensors
from lightning_ptdp.base.random import derive_seed
from lightning_ptdp.data_parallel import GradientStore
from lightning_ptdp.data_parallel.sharded_parameters import ShardedParameters
from lightning_ptdp.engine.context_report import PartReports, full_outputs
from lightning_ptdp.engine.metric_groups import BatchMetrics
from lightning_ptdp.engine.microbatches import merge_outputs, signature
from lightning_ptdp.engine.step_inspection import BatchInspection
from lightning_ptdp.engine.step_loggers import StepLoggers
from lightning_ptdp.engine.step_report import (
    LogCall,
    LogRecorder,
    ReportStream,
    StepReport,
    average_calls,
    count_of,
    numbers_on,
    read_numbers,
)
from lightning_ptdp.engine.step_state import Owner, StepState
from lightning_ptdp.forward.surroundings import BatchPart, Context, Forward
from lightning_ptdp.pipeline.runtime import StepJob
from lightning_ptdp.shims.lightning import LightningModule
from lightning_ptdp.tensor_parallel import gather_full


def loss_and_weight(output: Nested) -> tuple[Tensor, Tensor | None]:
    """Return the loss of a training step's output, and the number of tokens in its mean.

    The number is None if the output does not give it. Both stay on the device, because waiting for
    a value would stall the pipeline.

    Raises:
        ValueError: The output is neither a tensor nor a mapping with a "loss".
    """
    if isinstance(output, Tensor):
        return output, None
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        tokens = num_tokens(output)
        loss = output["loss"]
        return loss, None if tokens is None else tokens.to(loss.device, torch.float32)
    raise ValueError(
        f"training_step returned {type(output).__name__}, but with this strategy it must "
        "return the loss tensor or a dictionary with 'loss' (and 'num_tokens' to weight "
        "microbatches by their tokens). To skip a batch while other ranks train, return the "
        "loss times zero instead of None"
    )


def num_tokens(output: Nested) -> Tensor | None:
    """Return the number of tokens over which a step's loss is the mean, if its output has one."""
    tokens = output.get("num_tokens") if isinstance(output, Mapping) else None
    return None if tokens is None else torch.as_tensor(tokens)


def counted_loss(loss: Tensor, weight: Tensor | None) -> Tensor:
    """Return ``loss``, or zero where ``weight`` is zero.

    A mean over no tokens may be 0/0. Select, do not multiply: 0 * NaN is NaN.
    """
    if weight is None:
        return loss
    return torch.where(weight > 0, loss, torch.zeros_like(loss))


@dataclass(frozen=True, eq=False)
class BegunReport:
    """Report whose numbers are being computed on the device.

    Attributes:
        report: The report.
        numbers: Loss, weight, logged values and spread, (n) float64.
        shares: Weights of the microbatches, (m) float64.
        parts: Numbers of the ranks with other parts of the microbatches; None: there are none.
    """

    report: StepReport
    numbers: Tensor
    shares: Tensor
    parts: PartReports | None


@dataclass(kw_only=True, eq=False)
class LightningJob(StepJob):
    """Runs a LightningModule's step on microbatches, called by the pipeline runtime.

    Attributes:
        module: The LightningModule.
        hook: "training_step", "validation_step", "test_step" or "predict_step".
        microbatches: One batch per microbatch.
        sizes: Number of samples in each microbatch.
        arguments: Arguments from Lightning after the batch.
        context: The precision plugin's context for one call of the step.
        step: Number of the training step.
        seed: Seed of random numbers: (run, hook, step).
        replica: Number of the replica.
        device: Device of the model.
        stages: Number of stages.
        metrics: Sets the values over the whole batch of the metrics that the step calls.
        owners: Modules on which the step may leave state.
        loggers: Stand-ins for the Trainer's loggers.
        shards: Sharded parameters; None: they are not sharded.
        gradients: Store to notify when gradients are complete; None outside of training.
        before_backward: Called before each backward and each sum over the replicas of a training.
            It completes the gathers of parameters.
        expected_tokens: Divisor of a loss that counts its tokens, in addition to the multiplication
            by them; a power of two.
        spread: Numbers of labels to read with the report (``label_spread``); None if they are not
            needed.
        inspection: Inspection of the first batch; None: this is a later one.
        scale: Factor on every loss that does not count its tokens, in addition to the microbatch's
            share of the samples.
        loss_scale: Factor on every loss; the gradients are not divided by it here.
        reduces: Whether this step completes an optimizer step.
        may_skip: The step may return None for the whole batch, which then has no effect.
        stream: Computes and reads the report.
        weigh: Replaces the numbers of a report that counts its tokens with those of all replicas;
            None: each replica keeps its own.
        losses: Losses of the microbatches whose last stage ran on this rank.
        skipped: The step returned None for all microbatches so far.
    """

    module: LightningModule
    hook: str
    microbatches: Sequence[Nested]
    sizes: Sequence[int]
    arguments: Sequence[object]
    context: Callable[[], Context]
    step: int
    seed: tuple[object, ...]
    replica: int
    device: torch.device
    stages: int
    metrics: BatchMetrics
    owners: Sequence[Owner]
    loggers: StepLoggers
    stream: ReportStream
    weigh: Callable[[StepReport], None] | None
    shards: ShardedParameters | None = None
    gradients: GradientStore | None = None
    before_backward: Callable[[], None] = lambda: None
    expected_tokens: float = 1.0
    spread: Tensor | None = None
    inspection: BatchInspection | None = None
    scale: float = 1.0
    loss_scale: Tensor | float = 1.0
    reduces: bool = False
    may_skip: bool = False
    losses: list[Tensor] = field(default_factory=list, init=False)
    skipped: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._outputs: list[Nested] = [None] * self.count
        self._calls: list[list[LogCall]] = [[] for _ in self.sizes]
        self._tokens: list[Tensor | None] = [None] * self.count
        self._shares: list[Tensor | float] = [1.0] * self.count
        self._part: BatchPart | None = None
        self._counts: bool | None = None
        self._awaited = self.count
        self._begun: BegunReport | None = None
        self._before: StepState | None = None

    @property
    def training(self) -> bool:
        """Return True if a backward follows."""
        return self.hook == "training_step"

    @property
    def count(self) -> int:
        """Return the number of microbatches."""
        return len(self.sizes)

    def signature(self, microbatch: int) -> Hashable:
        """Return the hook and the shapes and dtypes of the microbatch.

        The hook decides whether gradients flow, which may change a hidden state's dtype.
        """
        return self.hook, signature(self.microbatches[microbatch])

    def begin(self, stage: int, microbatch: int) -> Forward:
        """Return the forward of the user's step on one microbatch."""
        return Forward(
            hook=self.hook,
            step=self.step,
            stage=stage,
            microbatch=microbatch,
            full_batch=self.microbatches[microbatch],
            seed=derive_seed(*self.seed, self.replica * self.count + microbatch),
        )

    def forward(self, forward: Forward) -> Nested:
        """Run the user's step on the microbatch."""
        step = getattr(self.module, self.hook)
        recorder = LogRecorder(self.module)
        is_last = forward.stage == self.stages - 1
        watched: Context = contextlib.nullcontext()
        if self.inspection is not None and forward.microbatch == 0 and is_last:
            watched = self.inspection.watched()
        batch = forward.batch
        if self.stages > 1 and forward.part is None:
            # The step may change its batch, but other stages and microbatches need theirs.
            batch = map_tensors(batch, Tensor.clone)
        loggers = self.loggers.replaced(is_last=is_last)
        with (
            self._kept_state(forward),
            contextlib.nullcontext() if self.gradients is None else self.gradients.set_aside(),
            recorder,
            loggers,
            self.context(),
            watched,
        ):
            output = step(batch, *self.arguments)
        self._calls[forward.microbatch] = recorder.calls
        return output

    @contextlib.contextmanager
    def _kept_state(self, forward: Forward) -> Iterator[None]:
        """Keep the step's changes of the module only if this is the last stage's run."""
        if forward.stage == self.stages - 1:
            if self._before is None and self.stages > 1:
                self._before = StepState(self.owners)
            several = self.count > 1 or forward.part is not None
            with self.metrics.watching(forward.part) if several else contextlib.nullcontext():
                yield
            return
        before = StepState(self.owners)
        try:
            yield
        finally:
            before.restore()

    def finish(self, forward: Forward, output: Nested) -> Tensor | None:
        """Keep the output and, in training, return the loss to differentiate.

        The loss is scaled, and weighted by samples or tokens.
        """
        loss = self._keep(forward, output)
        self._awaited -= 1
        if not self._awaited and not self.skipped and self.stream.is_apart:
            # Its sum over the replicas follows the gathers of parameters, as on all of them.
            self.before_backward()
            self._begun = self._begin_report()
        return loss

    def _keep(self, forward: Forward, output: Nested) -> Tensor | None:
        microbatch = forward.microbatch
        part = forward.part
        self._part = part
        if self.training and self._is_skipped(output):
            return None
        loss, tokens = (
            loss_and_weight(output)
            if self.training
            else (torch.zeros((), device=self.device), num_tokens(output))
        )
        if self.inspection is not None and tokens is None:
            self.inspection.check_loss(loss, self.microbatches[microbatch], part)
        if part is not None and tokens is None:
            share = self._shares[microbatch] = part.share(loss.detach())
            loss = counted_loss(loss, share) * share
        elif part is not None and part.shifted_targets is not None:
            tokens = part.shifted_targets
            output = {**output, "num_tokens": tokens}
        self._tokens[microbatch] = tokens
        self._outputs[microbatch] = _detached(output)
        if not self.training:
            return None
        counts = tokens is not None
        if self._counts not in (None, counts):
            raise ValueError(
                "training_step returned 'num_tokens' for some microbatches of a batch, but not for "
                "others. Return it always, also as 0"
            )
        self._counts = counts
        loss = counted_loss(loss, tokens)
        self.losses.append(loss.detach())
        if tokens is None:
            return loss * (self.sizes[microbatch] / sum(self.sizes) * self.scale * self.loss_scale)
        # All tokens are counted only after the last microbatch has run: their sum is divided out of
        # the gradients at the end. Until then, the expected number keeps the gradients at the
        # magnitude of one process, which matters in float16.
        return loss * (tokens * (self.loss_scale / self.expected_tokens))

    def _is_skipped(self, output: Nested) -> bool:
        if output is None and self.may_skip and not self.losses:
            self.skipped = True
        elif self.skipped:
            raise ValueError(
                "training_step returned None for some microbatches of a batch and a loss for "
                "others. To skip a microbatch, return the loss times zero"
            )
        return self.skipped

    def before_gradients(self, stage: int, awaited: Sequence[Tensor] | None, *, last: bool) -> None:
        """Let reductions start as the gradients of this stage are completed."""
        if self.gradients is not None:
            self.before_backward()
            self.gradients.expect(stage, awaited, last=last and self.reduces)

    def gradient_complete(self, parameter: Tensor) -> None:
        """Notify the store, which may start a reduction."""
        if self.gradients is not None:
            self.gradients.complete(parameter)

    def reduce(self, stage: int, *, last: bool) -> None:
        """Start the remaining reductions of this stage."""
        if self.gradients is not None:
            self.gradients.reduce(stage, last=last and self.reduces)

    def gather(self, stage: int) -> None:
        """Start to gather the sharded parameters of this stage."""
        if self.shards is not None:
            self.shards.gather(stage)

    def free(self, stage: int) -> None:
        """Free the other replicas' parts of them."""
        if self.shards is not None:
            self.shards.free(stage)

    def report(self) -> StepReport:
        """Return the last stage's report after all microbatches have run.

        The host waits for the device once. It waits only for the forwards if the device can compute
        the report concurrently with the backwards.
        """
        begun = self._begun or self._begin_report()
        report = begun.report
        self.metrics.settle()
        with self.stream.entered():
            microbatch_weights, part_weights = self._read(begun)
        report.extras = self._extras(microbatch_weights, part_weights)
        if self._before is not None:
            report.changes = self._before.changes()
        report.logger_calls = self.loggers.taken()
        return report

    @torch.no_grad()
    def _begin_report(self) -> BegunReport:
        """Queue the computation of the report's numbers, which are on the device."""
        with self.stream.entered(after=True):
            counted = all(tokens is not None for tokens in self._tokens)
            part = self._part
            weights = numbers_on(self.device, self._tokens if counted else self.sizes)
            shares = (
                weights
                if counted or part is None
                else weights * numbers_on(self.device, self._shares)
            )
            logged = numbers_on(
                self.device, [call.value for calls in self._calls for call in calls]
            )
            losses = numbers_on(self.device, self.losses)
            calls = average_calls(
                self._calls,
                logged,
                shares,
                metric_path=self._metric_path,
                counted=counted or part is not None,
                losses=losses if self.training and counted and part is None else None,
            )
            stops = self.module.trainer.should_stop
            report = StepReport(weight=weights.sum(), counted=counted, calls=calls, stops=stops)
            if self.training and not self.skipped:
                report.loss = torch.where(weights != 0, losses * weights, 0.0).sum()
            parts = (
                None
                if part is None
                else PartReports(report, weight=shares.sum(), group=part.group, device=self.device)
            )
            if self.weigh is not None:
                self.weigh(report)
            spread = [] if self.spread is None else [*self.spread]
            numbers = numbers_on(
                self.device,
                [report.loss, report.weight, *(call.value for call in report.calls), *spread],
            )
            return BegunReport(report, numbers, shares, parts)

    def _read(self, begun: BegunReport) -> tuple[list[float], list[float]]:
        """Read the report's numbers from the device into the report.

        Returns:
            The weights of the microbatches, and of the ranks that have other parts of them.
        """
        report = begun.report
        parts = begun.parts
        (loss, weight, *values), microbatch_weights, part_weights = read_numbers(
            begun.numbers, begun.shares, begun.numbers[:0] if parts is None else parts.numbers
        )
        report.loss = loss
        report.weight = weight
        report.spread = values[len(report.calls) :]
        report.calls = [
            replace(call, value=value) if call.metric is None else call
            for call, value in zip(report.calls, values, strict=False)
        ]
        return microbatch_weights, [] if parts is None else parts.read(report, part_weights)

    def _extras(self, weights: Sequence[float], part_weights: Sequence[float]) -> Nested:
        """Return the outputs for the whole batch; collective over the context group, if there is one.

        Numbers of tokens are summed.
        """
        outputs = self._outputs
        part = self._part
        if self.training:
            if not isinstance(outputs[0], Mapping):
                return None
            outputs = [
                {k: v for k, v in o.items() if k not in ("loss", "num_tokens")} for o in outputs
            ]
            if not outputs[0]:
                return None
        merged = merge_outputs(outputs, self.sizes, weights)
        is_sum = part is not None or len(outputs) > 1
        counts = is_sum and isinstance(merged, Mapping) and "num_tokens" in merged
        if counts:
            merged = {key: value for key, value in merged.items() if key != "num_tokens"}
        if part is not None:
            merged = full_outputs(
                merged,
                length=part.length,
                weights=part_weights,
                group=part.group,
                device=self.device,
            )
        if counts:
            total = count_of(float(sum(part_weights or weights)))
            merged["num_tokens"] = total.to(self.device, non_blocking=True)
        return merged

    def _metric_path(self, metric: object) -> str:
        for name, child in self.module.named_modules():
            if child is metric:
                return name
        raise ValueError(
            f"the logged metric {type(metric).__name__} is not an attribute of the "
            "LightningModule. Assign it in __init__"
        )


def _detached(output: Nested) -> Nested:
    """Return the output without graph; logits that are split over the vocabulary are gathered."""
    with torch.no_grad():
        return map_tensors(gather_full(output), torch.Tensor.detach)
