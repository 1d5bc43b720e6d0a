"""Memory of a layout's fullest rank, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.parameters import job_stages, layers_by_stage, rank_stages
from lightning_ptdp.planner.pass_time import num_logits
from lightning_ptdp.planner.replica_cost import (
    kept_unsharded_bytes,
    shards_parameters,
    static_bytes,
    unsharded_bytes,
)
from lightning_ptdp.planner.shapes import LayerShape
from lightning_ptdp.planner.sublayer_cost import (
    core_bytes,
    expert_buffers,
    expert_kept,
    input_bytes,
)
from lightning_ptdp.schedule.generators import FAMILIES
from lightning_ptdp.world.communicators import communicators
from lightning_ptdp.world.layout import ParallelLayout

# Memory of a communicator of two GPUs and of more, measured on A100s connected by NVLink
# (github.com/NVIDIA/nccl, question 964).
_PAIR = 544 * 2**20
_LARGER = 688 * 2**20


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Peak bytes of one rank by purpose.

    Attributes:
        pipeline_rank: Index of the rank in the pipeline.
        parameters: Number of parameters, not bytes.
        weights: The parameters.
        gradients: Their gradients.
        optimizer: Adam's moments and the master weights.
        activations: Bytes that the layers keep for the backwards of all microbatches in flight.
        logits: Final norm, head and loss.
        working: Temporary bytes: a recomputed layer, gradients between the operations of a layer.
        communicators: NCCL's buffers, which are no tensors.
    """

    pipeline_rank: int
    parameters: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    working: float
    communicators: float = 0.0

    @property
    def total(self) -> float:
        """Return the sum of all parts in bytes."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Return the parts in bytes by name."""
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("pipeline_rank", "parameters")
        }


def fullest_rank(job: Job, choice: Choice) -> RankMemory:
    """Return the peak memory of the rank that needs most."""
    # Held activations decrease from the first to the last rank. Stages with a remainder layer may
    # be anywhere at the front.
    layout = choice.layout
    kinds = _kinds(job, choice)
    num_layers = layers_by_stage(job, layout.num_stages)
    largest = num_layers.index(max(num_layers))
    # If layers differ, as mixtures and dense layers do, a stage with few layers may be the
    # heaviest.
    parameters = [stage.parameters for stage in job_stages(job, layout)]
    heaviest = parameters.index(max(parameters))
    ranks = {
        0,
        min(1, choice.p - 1),
        layout.last_stage_rank,
        *map(layout.rank_of_stage, (largest, heaviest)),
    }
    return max(
        (rank_memory(job, choice, rank, kinds) for rank in sorted(ranks)),
        key=lambda memory: memory.total,
    )


def _kinds(job: Job, choice: Choice) -> dict[int, LayerActivations]:
    """Return the activations of each kind of layer by its ``id``."""
    return {id(layer): layer_activations(job, choice, layer) for _, layer in job.shape.runs}


def rank_memory(
    job: Job,
    choice: Choice,
    pipeline_rank: int,
    kinds: Mapping[int, LayerActivations] | None = None,
) -> RankMemory:
    """Return the peak memory of one pipeline rank.

    Its tensor-, context- and data-parallel peers hold the same. All stages of a rank are assumed to
    be as large as its largest one. On the last stage, the peak is in the backward of the head or of
    the last layer.
    """
    layout = choice.layout
    local_stages = layout.stages_of(pipeline_rank)
    stages = rank_stages(job, layout, pipeline_rank)
    kinds = kinds or _kinds(job, choice)
    in_flight = _held(choice, pipeline_rank)
    parameters = sum(stage.parameters for stage in stages)
    experts = sum(stage.experts for stage in stages)
    weights, gradients, optimizer = static_bytes(job, choice, parameters, experts)
    weights += kept_unsharded_bytes(job, choice, local_stages, parameters)
    kept = [sum(count * kinds[id(layer)].kept for count, layer in stage.runs) for stage in stages]
    cast_weights = [
        sum(count * kinds[id(layer)].cast_weights for count, layer in stage.runs)
        for stage in stages
    ]
    # All microbatches share the cast weights, but not those of parameters that are freed meanwhile.
    shared = sum(cast_weights)
    if shards_parameters(job, choice):
        shared = in_flight * max(cast_weights)
    working = max(
        kinds[id(layer)].recomputed
        + _between_operations(job, choice, layer)
        + unsharded_bytes(job, choice, layer)
        for stage in stages
        for _, layer in stage.runs
    )
    logits = 0.0
    if layout.num_stages - 1 in local_stages:
        of_logits, extra = logits_bytes(job, choice)
        # The last stage's backward follows its forward, unless the schedule runs all forwards
        # first. The head's backward, including its weight gradient, ends before that of the last
        # layer starts.
        extra += job.shape.head.table_elements(choice.t) * job.precision.weight
        waiting = of_logits * (choice.num_microbatches - 1) if choice.schedule == "gpipe" else 0.0
        logits = waiting + of_logits + extra
        working = max(0.0, working - of_logits - extra)
    return RankMemory(
        pipeline_rank=pipeline_rank,
        parameters=parameters,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=in_flight * max(kept) + shared + _inputs(job, choice, local_stages),
        logits=logits,
        working=working,
        # none on a CPU, or if the user has subtracted them
        communicators=_communicators(layout, pipeline_rank) if job.device.reserved_bytes else 0.0,
    )


@lru_cache(maxsize=4096)
def _communicators(layout: ParallelLayout, pipeline_rank: int) -> float:
    rank = layout.group_of("pipeline", 0)[pipeline_rank]
    return sum(_PAIR if len(ranks) == 2 else _LARGER for ranks in communicators(layout, rank))


def _held(choice: Choice, pipeline_rank: int) -> int:
    if choice.p == 1:
        return 1
    family = FAMILIES[choice.schedule]
    return family.held(choice.p, choice.v, choice.num_microbatches, pipeline_rank)


def _inputs(job: Job, choice: Choice, stages: tuple[int, ...]) -> float:
    """Return the bytes of a rank's embedding and of the cast copy of the head.

    The embedding keeps the ids and the mask of its dropout.
    """
    total = 0.0
    layout = choice.layout
    if 0 in stages:
        total += _held(choice, layout.rank_of_stage(0)) * choice.bytes_of(job.shape.input.kept)
    if layout.num_stages - 1 in stages and job.precision.casts:
        total += job.shape.head.elements(choice.t) * job.precision.compute
    return total


def _between_operations(job: Job, choice: Choice, layer: LayerShape) -> float:
    """Return the bytes of temporary gradients in a layer's backward.

    They are two gradients of the layer's widest activation, two of the residual stream, and one
    matrix's gradient before it is accumulated. For experts, they are the exchanged rows and the
    gradient of the larger of their matrices.
    """
    t = choice.t
    width = job.precision.compute
    widest = max(
        (
            product.rows * product.local(t)[0]
            for product in layer.products
            if product.cut == "outputs"
        ),
        default=0,
    )
    stream = layer.crossing / job.precision.weight
    dense = choice.samples * (2 * widest + 2 * stream) * width + layer.elements(t) / 3 * width
    if layer.experts is None:
        return dense
    (outputs, inputs), _ = layer.experts.matrices
    largest = (
        layer.expert_parameters(choice.layout) * outputs * inputs / layer.experts.parameters * width
    )
    return max(dense, expert_buffers(layer.experts, job, choice) + largest)


# ---- Bytes that a layer keeps for its backward, per microbatch and rank --------------------------


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """Activation memory of one layer and one microbatch.

    Attributes:
        kept: Bytes kept from the forward to the backward, under the chosen recomputation.
        recomputed: Additional bytes during the layer's backward, because they are recomputed or
            fetched.
        cast_weights: Bytes of weights in the computing precision, kept once for all microbatches.
    """

    kept: float
    recomputed: float
    cast_weights: float


def layer_activations(
    job: Job, choice: Choice, layer: LayerShape | None = None
) -> LayerActivations:
    """Return the bytes that one layer keeps of one microbatch.

    Args:
        job: Model and precision.
        choice: Layout, microbatch and recomputation.
        layer: The layer; None means the model's first layer.
    """
    layer = layer or job.shape.runs[0][1]
    cores = sum(core_bytes(job, choice, attention) for attention in layer.attentions)
    total = choice.bytes_of(layer.kept) + cores
    if layer.experts is not None:
        total += expert_kept(layer.experts, job, choice)
    cast = 0.0
    if job.precision.casts:
        elements = layer.elements(choice.t) + layer.expert_parameters(choice.layout)
        cast = elements * job.precision.compute
    if choice.recompute == "full":
        return LayerActivations(
            kept=_block_input(choice, layer), recomputed=total + cast, cast_weights=0.0
        )
    if choice.recompute == "offload":
        # Little of each block stays on the device. The current block and one neighbour are
        # complete.
        return LayerActivations(kept=0.0, recomputed=2 * total, cast_weights=cast)
    internals = cores - sum(input_bytes(job, choice, attention) for attention in layer.attentions)
    if choice.recompute == "selective" and job.software.again is not None:
        results = sum(product.rows * product.local(choice.t)[0] for product in layer.products)
        kept = (
            choice.samples * (1 - job.software.again) * results * job.precision.compute
            + internals
            + _block_input(choice, layer)
        )
        return LayerActivations(kept=kept, recomputed=max(0.0, total - kept), cast_weights=cast)
    if choice.recompute == "selective":
        # The core's inputs are kept for its recomputation, its output for the following projection.
        return LayerActivations(kept=total - internals, recomputed=internals, cast_weights=cast)
    return LayerActivations(kept=total, recomputed=0.0, cast_weights=cast)


def logits_bytes(job: Job, choice: Choice) -> tuple[float, float]:
    """Return the bytes of the last stage's norm, head and loss for one microbatch.

    The first number is kept for the backward. The second is needed in addition when the backward
    starts.

    The loss keeps its logits, or their log-softmax, in their own precision. Autocast computes and
    keeps the loss in fp32. With a split vocabulary the gradient is computed in fp32 and then cast.
    (arXiv 2205.05198, section 4.3, counts 4 s b V / t.)
    """
    t = choice.t
    width = job.precision.compute
    head = job.shape.head
    logits = num_logits(job, choice)
    kept = 4 if (job.precision.casts and t == 1) or job.software.single_loss else width
    gradient_width = 4 if t > 1 else kept
    return logits * kept + choice.bytes_of(head.kept), logits * (
        gradient_width + (width if gradient_width != width else 0)
    )


def _block_input(choice: Choice, layer: LayerShape) -> float:
    split = choice.layout.sequence_parallel or choice.distribute_saved_activations
    return choice.samples * layer.crossing / (choice.t if split else 1)
