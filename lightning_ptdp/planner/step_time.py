"""Seconds of an optimizer step and of its parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ptdp.planner.communication import group_link
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.layer_time import head_time, input_time, layer_time
from lightning_ptdp.planner.parameters import job_stages, rank_stages
from lightning_ptdp.planner.pass_time import NOTHING, PassTime
from lightning_ptdp.planner.replica_cost import gradients_time, optimizer_time
from lightning_ptdp.schedule.generators import FAMILIES, build_schedule
from lightning_ptdp.schedule.simulate import Costs, Timeline, simulate
from lightning_ptdp.world.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step of one rank, in seconds.

    Attributes:
        compute: Forwards and backwards of the slowest rank, including recomputation, without
            waiting.
        experts: Forwards and backwards of the experts of mixtures.
        dispatch: Sending tokens to their experts and back.
        tensor: Waiting for tensor and context parallelism.
        bubble: The pipeline's bubble, including waiting for slower stages.
        messages: Waiting for messages between stages.
        gradients: Exposed time to sum gradients over the replicas and to gather parameters.
        optimizer: The optimizer's step.
        sharing: Waiting for a core that other ranks use.
        model_flops: Operations that the mathematics needs, of all devices (``models/size.py``).
        hardware_flops: ``model_flops`` plus the recomputed forward passes.
        world_size: Number of devices.
        peak: Operations per second of one device.
    """

    compute: float
    experts: float = 0.0
    dispatch: float = 0.0
    tensor: float
    bubble: float
    messages: float
    gradients: float
    optimizer: float
    sharing: float = 0.0
    model_flops: float
    hardware_flops: float
    world_size: int
    peak: float

    @property
    def parts(self) -> dict[str, float]:
        """Return the parts in seconds by name."""
        excluded = ("model_flops", "hardware_flops", "world_size", "peak")
        return {name: value for name, value in vars(self).items() if name not in excluded}

    @property
    def total(self) -> float:
        """Return the seconds of a step."""
        return sum(self.parts.values())

    @property
    def tflops(self) -> float:
        """Return the operations per second and device in units of 10^12.

        Recomputation is included, as in arXiv 2104.04473.
        """
        return self.hardware_flops / self.total / self.world_size / 1e12

    @property
    def mfu(self) -> float:
        """Return the model FLOP utilization.

        It is the ratio of the operations that the mathematics needs to the devices' peak.
        """
        return self.model_flops / self.total / self.world_size / self.peak

    @property
    def bubble_fraction(self) -> float:
        """Return the ratio of the bubble to the time of computations and their collectives.

        The papers' value is (p - 1) / m.
        """
        return self.bubble / (self.compute + self.experts + self.dispatch + self.tensor)


def step_time(job: Job, choice: Choice) -> StepTime:
    """Return the time of a step by closed forms of the schedule's bubble.

    The closed forms (``schedule/generators/schedule_families.py``) are fast enough for many
    candidates.

    Raises:
        KeyError: The schedule has no closed form; use ``simulated_step_time``.
    """
    m = choice.num_microbatches
    p = choice.p
    stages = _stages(job, choice)
    bubble = messages = 0.0
    if p > 1:
        family = FAMILIES[choice.schedule]
        mean = sum(stages, NOTHING)
        bubble = family.bubble(p, choice.v, mean.forward / p, mean.backward / p, mean.weight / p)
        messages = (
            family.waits(p, choice.v, m) * _message(job, choice) if _hides_messages(job) else 0.0
        )
    slowest = _slowest(stages, choice.layout)
    length = m * (slowest.forward + slowest.backward) + bubble
    busy = m * sum(stage.forward + stage.backward for stage in stages) * _busy(job, choice, slowest)
    sharing = max(0.0, busy / job.shared_cores - length) if job.shared_cores else 0.0
    return _full_step(job, choice, slowest, bubble=bubble, messages=messages, sharing=sharing)


def simulated_step_time(job: Job, choice: Choice) -> StepTime:
    """Return the time of a step by the simulator, with the costs of each stage.

    The result is exact for unequal stages. The simulation is slow for large p v m.

    Raises:
        ValueError: The schedule does not support these sizes.
    """
    m = choice.num_microbatches
    stages = _stages(job, choice)
    schedule = build_schedule(
        choice.schedule,
        pipeline_parallel_size=choice.p,
        virtual_pipeline_size=choice.v,
        num_microbatches=m,
    )
    split = schedule.splits_backward

    def timeline(latency: float) -> Timeline:
        costs = Costs(
            forward=[stage.forward for stage in stages],
            backward=[stage.backward - (stage.weight if split else 0.0) for stage in stages],
            weight=[stage.weight for stage in stages],
            latency=latency,
        )
        return simulate(schedule, costs)

    slowest = _slowest(stages, choice.layout)
    ideal = timeline(0.0)
    ideal_s = float(ideal.step_time)
    waited = (
        float(timeline(_message(job, choice)).step_time) - ideal_s if _hides_messages(job) else 0.0
    )
    return _full_step(
        job,
        choice,
        slowest,
        bubble=max(0.0, ideal_s - m * (slowest.forward + slowest.backward)),
        messages=waited,
        sharing=_shared(ideal, _busy(job, choice, slowest), job.shared_cores),
    )


def _busy(job: Job, choice: Choice, rank: PassTime) -> float:
    """Return the number of cores of a node that are busy while the ranks of one stage compute.

    These ranks process different data, or different parts of the same layers.
    """
    measured = job.device.measured
    waiting = rank.communication / (rank.forward + rank.backward)
    busy = 1 - waiting * (1 - (0.0 if measured is None else measured.waiting))
    return job.processes / choice.p * busy


def _shared(timeline: Timeline, rank_cores: float, cores: int) -> float:
    """Return the additional seconds of a step because its ranks share cores.

    While more ranks compute than there are cores, all of them slow down by the same factor. The
    timeline is stretched there, and the order of its events does not change.
    """
    if not cores:
        return 0.0
    changes = sorted(
        (float(time), step)
        for spans in timeline.spans
        for span in spans
        for time, step in ((span.start, 1), (span.end, -1))
    )
    extra = 0.0
    busy = 0
    for (time, step), (after, _) in itertools.pairwise(changes):
        busy += step
        extra += (after - time) * max(0.0, busy * rank_cores / cores - 1)
    return extra


def _hides_messages(job: Job) -> bool:
    return job.software.hides_messages and job.overlaps


def _stages(job: Job, choice: Choice) -> list[PassTime]:
    """Return the time of each stage, including the messages that block a rank.

    There is one message per direction and microbatch.
    """
    layers = {id(layer): layer_time(job, choice, layer) for _, layer in job.shape.runs}
    blocked = 0.0 if _hides_messages(job) else _message(job, choice)
    message = PassTime(forward=blocked, backward=blocked)
    stage_runs = [
        tuple((count, id(layer)) for count, layer in stage.runs)
        for stage in job_stages(job, choice.layout)
    ]
    stage_times = {
        runs: sum((layers[layer].times(count) for count, layer in runs), message)
        for runs in set(stage_runs)
    }
    stages = [stage_times[runs] for runs in stage_runs]
    stages[0] += input_time(job, choice)
    stages[-1] += head_time(job, choice).times(job.software.slower)
    return stages


def _slowest(stages: Sequence[PassTime], layout: ParallelLayout) -> PassTime:
    """Return the time of the slowest rank with all of its stages."""
    ranks = [
        sum((stages[stage] for stage in layout.stages_of(rank)), NOTHING)
        for rank in range(layout.pipeline_parallel_size)
    ]
    return max(ranks, key=lambda rank: rank.forward + rank.backward)


def _full_step(
    job: Job, choice: Choice, slowest: PassTime, *, bubble: float, messages: float, sharing: float
) -> StepTime:
    m = choice.num_microbatches
    fullest = max(
        (sum(stage.parameters for stage in stages), sum(stage.experts for stage in stages))
        for stages in (rank_stages(job, choice.layout, rank) for rank in range(choice.p))
    )
    waiting = m * slowest.communication
    experts = m * slowest.experts
    dispatch = m * slowest.dispatch
    blocked = 0.0 if _hides_messages(job) else 2 * m * choice.v * _message(job, choice)
    model, hardware = (
        job.global_batch_size * job.shape.flops(recompute=recompute, trained=job.trained)
        for recompute in (False, choice.recompute == "full")
    )
    gradients = gradients_time(
        job,
        choice,
        *fullest,
        hiding_s=slowest.backward if job.software.hides_gradients and job.overlaps else 0.0,
    )
    optimizer = optimizer_time(job, choice, *fullest)
    if job.shared_cores:  # all ranks run these at the same time
        sharing += (gradients + optimizer) * max(0.0, job.processes / job.shared_cores - 1)
    return StepTime(
        compute=m * (slowest.forward + slowest.backward) - waiting - blocked - experts - dispatch,
        experts=experts,
        dispatch=dispatch,
        tensor=waiting,
        bubble=bubble,
        messages=messages + blocked,
        gradients=gradients,
        optimizer=optimizer,
        sharing=sharing,
        model_flops=model,
        hardware_flops=hardware,
        world_size=job.world_size,
        peak=job.device.peak(job.precision.compute),
    )


def _message(job: Job, choice: Choice) -> float:
    """Return the seconds of one hidden state between stages.

    Each tensor-parallel rank sends 1/t of it, and the receivers gather it unless the sequence is
    split (arXiv 2104.04473, section 4.1).
    """
    if choice.p == 1:
        return 0.0
    nbytes = choice.samples * max(layer.crossing for _, layer in job.shape.runs)
    link = group_link(choice.layout, job.cluster, "pipeline")
    if choice.layout.sequence_parallel:
        return link.send(nbytes / choice.t)
    gathering = group_link(choice.layout, job.cluster, "tensor")
    return link.send(nbytes / choice.t) + gathering.all_gather(nbytes)
