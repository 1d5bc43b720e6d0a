"""Seconds that one rank spends on one layer, and on the ends of the model, for one microbatch.

Matrix products and attention run at a share of the peak, or as fast as memory delivers their operands; the operations between them
read and write about what the layer keeps, once in the forward and twice in the backward. Collectives of tensor parallelism add to
that what the product beside them does not hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ptdp.models.size import layer_matrices
from lightning_ptdp.planner.activations import layer_activations
from lightning_ptdp.planner.communication import group_link
from lightning_ptdp.planner.job import Choice, Job

__all__ = ["NOTHING", "PassTime", "head_time", "input_time", "layer_time"]

_FORWARD_KERNELS = 14
_ATTENTION_BACKWARD = 2.5
"""The backward of fused attention makes five products where the forward makes two (arXiv 2307.08691, section 3.1.2)."""


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Seconds of one microbatch.

    Attributes:
        forward: The forward pass.
        backward: The whole backward pass, recomputation and weight gradients included.
        weight: Of that, the gradients of the weights, which a schedule may put off.
        communication: Of both passes, what is spent waiting for collectives.
    """

    forward: float
    backward: float
    weight: float
    communication: float = 0.0

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(**{name: value + vars(other)[name] for name, value in vars(self).items()})

    def times(self, count: int) -> PassTime:
        """``count`` of them after each other."""
        return PassTime(**{name: count * value for name, value in vars(self).items()})


NOTHING = PassTime(forward=0.0, backward=0.0, weight=0.0)


def layer_time(job: Job, choice: Choice) -> PassTime:
    """One transformer layer."""
    products = _products(job, choice)
    gemms = sum(products)
    attention, ring = _attention(job, choice)
    memory = _memory_traffic(job, choice) / job.device.memory_bandwidth
    sent_forward, sent_backward = _tensor_collectives(job, choice, products)

    least = _FORWARD_KERNELS * job.device.kernel_s
    forward = max(least, gemms + max(attention, ring) + memory) + sent_forward
    again = forward if choice.recompute == "full" else attention if choice.recompute == "selective" else 0.0
    attention_backward = max(_ATTENTION_BACKWARD * attention, 2 * ring)
    backward = max(2 * least, 2 * gemms + attention_backward + 2 * memory) + sent_backward + again
    waiting = sent_forward * (2 if choice.recompute == "full" else 1) + sent_backward
    waiting += max(0.0, ring - attention) + max(0.0, 2 * ring - _ATTENTION_BACKWARD * attention)
    return PassTime(forward=forward, backward=backward, weight=gemms, communication=waiting)


def input_time(job: Job, choice: Choice) -> PassTime:
    """The embedding: a look-up, and the sum over the split vocabulary."""
    nbytes = choice.tokens(job) * job.model.hidden_size * job.precision.residual
    lookup = 2 * nbytes / job.device.memory_bandwidth
    summed = group_link(choice.layout, job.device, "tensor").all_reduce(nbytes)
    return PassTime(forward=lookup + summed, backward=2 * lookup, weight=0.0, communication=summed)


def head_time(job: Job, choice: Choice) -> PassTime:
    """The output head and the loss."""
    model, t = job.model, choice.layout.tensor_parallel_size
    tokens, rows = choice.tokens(job), -(-model.vocabulary_size // t)
    product = _gemm(job, tokens, rows, model.hidden_size)
    loss = tokens * rows * (job.precision.compute + 8) / job.device.memory_bandwidth
    summed = group_link(choice.layout, job.device, "tensor").all_reduce(tokens * model.hidden_size * job.precision.compute)
    exposed = max(0.0, summed - product)
    return PassTime(forward=product + loss, backward=2 * product + 2 * loss + exposed, weight=product, communication=exposed)


def _products(job: Job, choice: Choice) -> Sequence[float]:
    """Forward seconds of a layer's matrix products: qkv, projection, up, down."""
    shapes = layer_matrices(job.model, choice.layout.tensor_parallel_size)
    return [_gemm(job, choice.tokens(job), outputs, inputs) for outputs, inputs in shapes]


def _gemm(job: Job, tokens: float, outputs: float, inputs: float) -> float:
    """(tokens, inputs) times (inputs, outputs)."""
    device, width = job.device, job.precision.compute
    work = 2 * tokens * outputs * inputs / (device.peak(width) * device.gemm_efficiency)
    traffic = width * (tokens * inputs + inputs * outputs + tokens * outputs) / device.memory_bandwidth
    return max(work, traffic)


def _attention(job: Job, choice: Choice) -> tuple[float, float]:
    """Seconds of the attention's forward, causal, and of sending keys and values around the ring of context parallelism."""
    model, device, width = job.model, job.device, job.precision.compute
    (qkv, _), (_, q), *_ = layer_matrices(model, choice.layout.tensor_parallel_size)
    work = 4 * choice.tokens(job) * job.sequence_length * q / 2
    ring = group_link(choice.layout, device, "context")
    block = choice.tokens(job) * (qkv - q) * width
    return work / (device.peak(width) * device.attention_efficiency), (ring.size - 1) * ring.send(block)


def _memory_traffic(job: Job, choice: Choice) -> float:
    held = layer_activations(job, choice)
    return held.recomputed if choice.recompute == "full" else held.kept


def _tensor_collectives(job: Job, choice: Choice, products: Sequence[float]) -> tuple[float, float]:
    """Seconds of waiting in the forward and in the backward.

    Without sequence parallelism an all-reduce in each half of the layer and direction, the backward's beside the product of the weight
    gradient. With it an all-gather and a reduce-scatter; in the backward the gradient is gathered first, while the input's gather and
    the reduce-scatter run beside products (tensor_parallel/linear.py).
    """
    group = group_link(choice.layout, job.device, "tensor")
    if group.size == 1:
        return 0.0, 0.0
    nbytes = choice.tokens(job) * job.model.hidden_size * job.precision.compute
    qkv, _, up, _ = products
    if choice.layout.sequence_parallel:
        one = group.all_gather(nbytes)
        hidden = sum(2 * max(0.0, one - product) for product in (qkv, up))
        return 4 * one, 2 * one + hidden
    one = group.all_reduce(nbytes)
    return 2 * one, sum(max(0.0, one - product) for product in (qkv, up))
