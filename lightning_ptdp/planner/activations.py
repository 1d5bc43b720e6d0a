"""Bytes that a transformer layer keeps for its backward, per microbatch and rank."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ptdp.planner.attention_cost import core_bytes, input_bytes
from lightning_ptdp.planner.expert_cost import expert_kept
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.shapes import Bytes, LayerShape


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
    total = kept_on(choice, layer.kept) + cores
    cast = 0.0
    if job.precision.casts:
        cast = layer.elements(choice.layout.tensor_parallel_size) * job.precision.compute
    if layer.experts is not None:
        total += expert_kept(layer.experts, job, choice)
        if job.precision.casts:
            cast += layer.experts.local(choice.layout) * job.precision.compute
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
        results = sum(
            product.rows * product.local(choice.layout.tensor_parallel_size)[0]
            for product in layer.products
        )
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
    t = choice.layout.tensor_parallel_size
    width = job.precision.compute
    head = job.shape.head
    logits = 0.0
    if head.products:
        last = head.products[-1]
        logits = choice.samples * last.rows * last.local(t)[0]
    kept = 4 if (job.precision.casts and t == 1) or job.software.single_loss else width
    gradient_width = 4 if t > 1 else kept
    return logits * kept + kept_on(choice, head.kept), logits * (
        gradient_width + (width if gradient_width != width else 0)
    )


def kept_on(choice: Choice, kept: Bytes) -> float:
    """Return the bytes of a microbatch on one rank."""
    layout = choice.layout
    return kept.on(
        samples=choice.micro_batch_size,
        t=layout.tensor_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        c=layout.context_parallel_size,
    )


def _block_input(choice: Choice, layer: LayerShape) -> float:
    split = choice.layout.sequence_parallel or choice.distribute_saved_activations
    return choice.samples * layer.crossing / (choice.layout.tensor_parallel_size if split else 1)
