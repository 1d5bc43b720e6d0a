"""Seconds that one rank spends on one layer, and on the ends of the model, for one microbatch.

The device computes products by their shapes (products.py) and reads and writes what lies between them (elementwise.py); collectives of
tensor parallelism add what no product beside them hides. If the host needs longer to launch all of it, its time counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ptdp.models.size import layer_matrices
from lightning_ptdp.planner.communication import GroupLink, group_link
from lightning_ptdp.planner.elementwise import attention_traffic, layer_traffic
from lightning_ptdp.planner.expert_shape import experts_of
from lightning_ptdp.planner.experts import expert_time, expert_traffic, local_experts
from lightning_ptdp.planner.fresh import fresh_seconds, layer_tensors
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.parameters import matrix_elements
from lightning_ptdp.planner.products import product_time

__all__ = ["NOTHING", "PassTime", "head_time", "input_time", "layer_time"]

_DISPATCH_OPERATIONS, _EXPERT_OPERATIONS = 50, 5
"""Counted by reading expert_parallel/dispatch.py and a router: scores, choice, order, counts, two exchanges, weighted sum; and for each
call two products, the gate's activation and its product."""
_FUSED_BACKWARD = 2.5
"""The backward of fused attention makes five products where the forward makes two (arXiv 2307.08691, section 3.1.2)."""


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Seconds of one microbatch.

    Attributes:
        forward: The forward pass.
        backward: The whole backward pass, recomputation and weight gradients included.
        weight: Of that, the gradients of the weights, which a schedule may put off.
        communication: Of both passes, what is spent waiting for collectives, those of experts aside.
        experts: Of both passes, the products of experts.
        dispatch: Of both passes, their all-to-alls.
    """

    forward: float
    backward: float
    weight: float
    communication: float = 0.0
    experts: float = 0.0
    dispatch: float = 0.0

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def times(self, count: int) -> PassTime:
        """``count`` of them after each other."""
        return PassTime(**{name: count * value for name, value in vars(self).items()})


NOTHING = PassTime(forward=0.0, backward=0.0, weight=0.0)


@dataclass(frozen=True)
class _Products:
    """Seconds of one product, and of those of its backward."""

    forward: float
    input_gradient: float
    weight_gradient: float


def layer_time(job: Job, choice: Choice, *, mixture: bool = False) -> PassTime:
    """One transformer layer; ``mixture``: with experts."""
    software, stream, t = job.software, _layer_stream(job), choice.layout.tensor_parallel_size
    products = [_products(job, choice, *shape) for shape in layer_matrices(job.model, t, mixture=mixture)]
    traffic = layer_traffic(job, choice, mixture=mixture)
    core, core_backward, exposed, exposed_backward = _attention(job, choice)
    sent, sent_backward, collectives = _tensor_collectives(job, choice, products, mixture=mixture)
    moved, moved_backward = _moved(job, choice)
    experts, travel, operations = _experts(job, choice) if mixture else (NOTHING, 0.0, 0)

    fresh, fresh_backward = (fresh_seconds(job, sizes) for sizes in layer_tensors(job, choice, mixture=mixture))
    measured = job.device.measured
    operation_s = software.operation_s if measured is None else measured.operation_s
    host = operation_s * (software.operations + operations + collectives * software.collective_operations)
    forward = sum(one.forward for one in products) + core + traffic.forward / stream + fresh + moved + sent + exposed
    forward += experts.forward + travel
    forward, waited = _beside(job, host, forward), sent + exposed
    weight = sum(one.weight_gradient for one in products) + experts.weight + _accumulation(job, choice, mixture=mixture)
    backward = sum(one.input_gradient for one in products) + weight + core_backward + traffic.backward / stream
    backward += experts.backward - experts.weight + travel
    backward = _beside(job, 2 * host, backward + fresh_backward + moved_backward + sent_backward + exposed_backward)
    again = choice.recompute == "full"
    if again:
        backward, waited = backward + forward, 2 * waited
    elif choice.recompute == "selective":
        backward += core
    return PassTime(
        forward=forward,
        backward=backward,
        weight=weight,
        communication=waited + sent_backward + exposed_backward,
        experts=(1 + again) * experts.forward + experts.backward,
        dispatch=(2 + again) * travel,
    )


def _experts(job: Job, choice: Choice) -> tuple[PassTime, float, int]:
    """Of a layer's experts: router, products and what lies between them; the all-to-alls of one direction; operations of a forward."""
    experts = experts_of(job.model)
    assert experts is not None
    time, traffic = expert_time(experts, job, choice), expert_traffic(experts, job, choice)
    router = _products(job, choice, experts.number, experts.hidden)
    made = PassTime(
        forward=time.forward + router.forward + traffic[0] / _layer_stream(job),
        backward=time.backward + router.input_gradient + router.weight_gradient + traffic[1] / _layer_stream(job),
        weight=time.weight,
    )
    calls = 1 if job.software.groups_products and job.device.kind == "cuda" else local_experts(experts, choice)
    return made, time.dispatch, _DISPATCH_OPERATIONS + _EXPERT_OPERATIONS * calls


def _layer_stream(job: Job) -> float:
    measured = job.device.measured
    return job.device.stream if measured is None or job.model.mlp == "gelu" else measured.gated


def _beside(job: Job, host: float, device: float) -> float:
    """The host launches while the device computes; a CPU does one after the other."""
    return host + device if job.device.kind == "cpu" else max(host, device)


def input_time(job: Job, choice: Choice) -> PassTime:
    """The embedding: a look-up, the sum over the split vocabulary, and the gradient of the table."""
    model, t = job.model, choice.layout.tensor_parallel_size
    nbytes = choice.tokens(job) * model.hidden_size * job.precision.residual
    lookup = 2 * nbytes / job.device.stream
    elements = -(-model.vocabulary_size // t) * model.hidden_size
    table = elements * (job.precision.weight + job.software.accumulation)
    fresh = fresh_seconds(job, [nbytes])
    group = group_link(choice.layout, job.cluster, "tensor")
    summed = group.all_gather(nbytes) if choice.layout.sequence_parallel else group.all_reduce(nbytes)
    gathered = group.all_gather(nbytes) if choice.layout.sequence_parallel else 0.0
    return PassTime(
        forward=lookup + fresh + summed,
        backward=2 * lookup
        + table / job.device.stream
        + fresh
        + fresh_seconds(job, [elements * job.precision.weight])
        + gathered,
        weight=0.0,
        communication=summed + gathered,
    )


def head_time(job: Job, choice: Choice) -> PassTime:
    """The output head and the loss."""
    model, t, sequence = job.model, choice.layout.tensor_parallel_size, choice.layout.sequence_parallel
    tokens, rows = choice.tokens(job), -(-model.vocabulary_size // t)
    product = _products(job, choice, rows, model.hidden_size)
    logits = tokens * rows
    measured = job.device.measured
    loss = logits * job.software.loss / (job.device.stream if measured is None else measured.loss)
    # The logits, those less their maximum, and their gradient.
    fresh = fresh_seconds(job, [logits * job.precision.compute])
    group, nbytes = group_link(choice.layout, job.cluster, "tensor"), tokens * model.hidden_size * job.precision.compute
    gathered = group.all_gather(nbytes) if sequence else 0.0
    summed = group.all_gather(nbytes) if sequence else group.all_reduce(nbytes)
    exposed = max(0.0, summed - product.weight_gradient) if job.software.hides_tensor and job.overlaps else summed
    weight = product.weight_gradient + rows * model.hidden_size * job.software.accumulation / job.device.stream
    return PassTime(
        forward=product.forward + loss / 3 + 2 * fresh + gathered,
        backward=product.input_gradient + weight + 2 / 3 * loss + fresh + exposed,
        weight=weight,
        communication=exposed + gathered,
    )


def _products(job: Job, choice: Choice, outputs: int, inputs: int) -> _Products:
    """(tokens, inputs) times (inputs, outputs), and its gradients."""
    device, width, tokens = job.device, job.precision.compute, max(1, round(choice.tokens(job)))
    if not outputs * inputs:
        return _Products(0.0, 0.0, 0.0)
    return _Products(
        forward=product_time(device, width, tokens, outputs, inputs),
        input_gradient=product_time(device, width, tokens, inputs, outputs),
        weight_gradient=product_time(device, width, outputs, inputs, tokens),
    )


def _accumulation(job: Job, choice: Choice, *, mixture: bool) -> float:
    """Seconds to add the gradients of a layer's weights to those of earlier microbatches: of all experts here, few tokens or many."""
    elements = matrix_elements(job.model, choice.layout.tensor_parallel_size, mixture=mixture)
    if mixture and (experts := experts_of(job.model)) is not None:
        elements += local_experts(experts, choice) * experts.parameters
    return elements * job.software.accumulation / job.device.stream


def _attention(job: Job, choice: Choice) -> tuple[float, float, float, float]:
    """Seconds of the attention's forward and backward, and of what they wait for keys and values round the ring of context parallelism."""
    model, device, software, width = job.model, job.device, job.software, job.precision.compute
    (qkv, _), (_, q), *_ = layer_matrices(model, choice.layout.tensor_parallel_size)
    tokens, length = choice.tokens(job), job.sequence_length
    if job.fuses_attention and device.measured is not None:
        square = 4 * tokens * length * q
        speed = device.peak(width) / device.peak(4 if device.kind == "cpu" else 2)
        there, back = device.measured.attention_rates(length, model.head_dim)
        forward, backward = square / (there * speed), _FUSED_BACKWARD * square / (back * speed)
    elif job.fuses_attention:
        work = 4 * tokens * length * q / (2 if software.skips_masked else 1)
        forward = work / (device.peak(width) * device.attention_share * device.sustained)
        backward = _FUSED_BACKWARD * forward
    else:
        heads = choice.micro_batch_size * model.num_heads // choice.layout.tensor_parallel_size
        mine, channels = round(length / choice.layout.context_parallel_size), model.head_dim
        scores = product_time(device, width, mine, length, channels, heads)
        values = product_time(device, width, mine, channels, length, heads)
        traffic = attention_traffic(job, choice)
        forward = scores + values + traffic.forward / device.stream
        # Each product's two gradients are one of its own shape, or of the other's.
        backward = 2 * (scores + values) + traffic.backward / device.stream
    ring = group_link(choice.layout, job.cluster, "context")
    around = (ring.size - 1) * ring.send(tokens * (qkv - q) * width)
    return forward, backward, max(0.0, around - forward), max(0.0, 2 * around - backward)


def _tensor_collectives(job: Job, choice: Choice, products: Sequence[_Products], *, mixture: bool) -> tuple[float, float, int]:
    """Seconds of waiting in the forward and in the backward, and how many collectives the forward has.

    Without sequence parallelism an all-reduce in each half of the layer and direction, the backward's beside the product of the weight
    gradient where the software does that. With it an all-gather and a reduce-scatter; in the backward the gradient is gathered first, while
    the input's gather and the reduce-scatter run beside products (tensor_parallel/linear.py).

    A mixture has the whole sequence on each rank, which sends a part of the tokens to the experts and gathers what comes back
    (tensor_parallel/experts.py).
    """
    group = group_link(choice.layout, job.cluster, "tensor")
    if group.size == 1:
        return 0.0, 0.0, 0
    nbytes = choice.tokens(job) * job.model.hidden_size * job.precision.compute
    qkv, _, up, _ = products
    split = choice.layout.sequence_parallel
    forward, backward = _half(job, group, nbytes, qkv, split=split)
    if mixture:
        joined = (2 if split else 1) * group.all_gather(nbytes)
        forward, backward = forward + joined, backward + joined
    if up.forward:
        more, more_back = _half(job, group, nbytes, up, split=split and not mixture)
        forward, backward = forward + more, backward + more_back
    return forward, backward, 4 if split or mixture else 2


def _half(job: Job, group: GroupLink, nbytes: float, product: _Products, *, split: bool) -> tuple[float, float]:
    """Of attention or feed-forward part, whose first product is ``product``."""
    hides = job.software.hides_tensor and job.overlaps
    if split:
        one = group.all_gather(nbytes)
        beside = (product.input_gradient, product.weight_gradient)
        return 2 * one, one + sum(max(0.0, one - product) if hides else one for product in beside)
    one = group.all_reduce(nbytes)
    return one, max(0.0, one - product.weight_gradient) if hides else one


def _moved(job: Job, choice: Choice) -> tuple[float, float]:
    """Seconds in a layer's forward and backward to bring the sequence, the second dimension of ours, to where collectives concatenate,
    and back: a copy for several samples, and what a collective gives is a tensor of its own."""
    if not choice.layout.sequence_parallel or not job.software.batch_first:
        return 0.0, 0.0
    nbytes = choice.tokens(job) * job.model.hidden_size * job.precision.compute
    one = fresh_seconds(job, [nbytes])
    if choice.micro_batch_size > 1:
        one += 2 * nbytes / job.device.stream + fresh_seconds(job, [nbytes])
    return 4 * one, 6 * one
