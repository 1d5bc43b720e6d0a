"""Seconds that one rank spends on a layer, or on an end of the model, per microbatch.

The device computes products by their shapes (``product_duration.py``), and reads and writes the
bytes of the operations between them (``shapes.py``). Collectives of tensor parallelism add the time
that no concurrent product hides. If the host needs longer to launch all of it, the host's time
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ptdp.planner.activations import kept_on
from lightning_ptdp.planner.attention_cost import attention_time
from lightning_ptdp.planner.communication import group_link
from lightning_ptdp.planner.context_cost import exchange_operations
from lightning_ptdp.planner.expert_cost import expert_time, expert_traffic, local_experts
from lightning_ptdp.planner.expert_shape import ExpertShape
from lightning_ptdp.planner.first_touch import fresh_seconds, layer_tensors
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.product_duration import product_time
from lightning_ptdp.planner.shapes import LayerShape, Product
from lightning_ptdp.planner.sharded_parameters import sharding_time

__all__ = ["NOTHING", "PassTime", "head_time", "input_time", "layer_time"]


_DISPATCH_OPERATIONS, _EXPERT_OPERATIONS = 50, 5
"""Operations of a dispatch and of one call to experts.

They are counted in ``expert_parallel/dispatch.py`` and a router. A dispatch has scores, choice,
order, counts, two exchanges and the weighted sum. Each call has two products, the gate's activation
and its product.
"""


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Seconds of one microbatch.

    Attributes:
        forward: The forward pass.
        backward: The whole backward pass, including recomputation and weight gradients.
        weight: Part of ``backward`` for the gradients of the weights, which a schedule may defer.
        communication: Part of both passes that waits for collectives, except those of experts.
        experts: Part of both passes for the products of experts.
        dispatch: Part of both passes for the all-to-alls of experts.
    """

    forward: float
    backward: float
    weight: float
    communication: float = 0.0
    experts: float = 0.0
    dispatch: float = 0.0

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(
            **{name: value + getattr(other, name) for name, value in vars(self).items()}
        )

    def times(self, count: float) -> PassTime:
        """Return the time of ``count`` such passes in sequence."""
        return PassTime(**{name: count * value for name, value in vars(self).items()})


NOTHING = PassTime(forward=0.0, backward=0.0, weight=0.0)


@dataclass(frozen=True)
class _Products:
    """Seconds of one product and of the products of its backward."""

    forward: float
    input_gradient: float
    weight_gradient: float


def layer_time(job: Job, choice: Choice, layer: LayerShape | None = None) -> PassTime:
    """Return the time of one layer; None means the model's first layer."""
    layer, software = layer or job.shape.runs[0][1], job.software
    stream = _layer_stream(job, layer)
    products = [
        _products(job, choice, product, float8=job.software.float8) for product in layer.products
    ]
    cores = [attention_time(job, choice, attention) for attention in layer.attentions]
    core, core_backward, exposed, exposed_backward = (
        (sum(parts) for parts in zip(*cores, strict=True)) if cores else (0.0,) * 4
    )
    sent, sent_backward, collectives = _tensor_collectives(job, choice, layer, products)

    moved, moved_backward = _moved(job, choice, layer)
    experts, travel, operations = (
        (NOTHING, 0.0, 0) if layer.experts is None else _experts(job, choice, layer, layer.experts)
    )

    fresh, fresh_backward = (
        fresh_seconds(job, sizes) for sizes in layer_tensors(job, choice, layer)
    )
    measured = job.device.measured
    operation_s = software.operation_s if measured is None else measured.operation_s
    operations += software.operations + len(layer.attentions) * exchange_operations(choice)
    host = operation_s * (operations + collectives * software.collective_operations)
    between, between_backward = (
        kept_on(choice, layer.forward) + _biases(job, choice, layer),
        kept_on(choice, layer.backward),
    )
    forward = (
        sum(one.forward for one in products)
        + core
        + between / stream
        + fresh
        + moved
        + sent
        + exposed
    )
    forward += experts.forward + travel
    forward, waited = _beside(job, host, forward), sent + exposed
    weight = (
        sum(one.weight_gradient for one in products)
        + experts.weight
        + _accumulation(job, choice, layer)
    )
    backward = (
        sum(one.input_gradient for one in products)
        + weight
        + core_backward
        + between_backward / stream
    )
    backward += experts.backward - experts.weight + travel
    backward = _beside(
        job, 2 * host, backward + fresh_backward + moved_backward + sent_backward + exposed_backward
    )
    again = choice.recompute == "full"
    if again:
        backward, waited = backward + forward, 2 * waited
    elif choice.recompute == "selective":
        backward += _selected(job, sum(one.forward for one in products), core, between / stream)
    forward, backward, weight = (
        software.slower * seconds for seconds in (forward, backward, weight)
    )
    gathered, scattered = sharding_time(job, choice, layer, forward, backward)
    return PassTime(
        forward=forward + gathered,
        backward=backward + scattered,
        weight=weight,
        communication=waited + sent_backward + exposed_backward + gathered + scattered,
        experts=(1 + again) * experts.forward + experts.backward,
        dispatch=(2 + again) * travel,
    )


def _selected(job: Job, products: float, attention: float, between: float) -> float:
    """Return the seconds of the operations that selective recomputation repeats."""
    share = job.software.again
    return attention if share is None else share * products + between


def _experts(
    job: Job, choice: Choice, layer: LayerShape, experts: ExpertShape
) -> tuple[PassTime, float, int]:
    """Return the times of a layer's experts.

    The result is (router, products and the operations between them; all-to-alls of one direction;
    number of operations of a forward).
    """
    time, traffic, stream = (
        expert_time(experts, job, choice),
        expert_traffic(experts, job, choice),
        _layer_stream(job, layer),
    )
    router = _products(
        job,
        choice,
        Product(rows=layer.products[0].rows, outputs=experts.number, inputs=experts.hidden),
    )
    made = PassTime(
        forward=time.forward + router.forward + traffic[0] / stream,
        backward=time.backward
        + router.input_gradient
        + router.weight_gradient
        + traffic[1] / stream,
        weight=time.weight,
    )
    calls = (
        1
        if job.software.groups_products and job.device.kind == "cuda"
        else local_experts(experts, choice)
    )
    return made, time.dispatch, _DISPATCH_OPERATIONS + _EXPERT_OPERATIONS * calls


def _layer_stream(job: Job, layer: LayerShape) -> float:
    measured = job.device.measured
    return measured.gated if measured is not None and layer.gated else job.device.stream


def _beside(job: Job, host: float, device: float) -> float:
    """Combine host and device: a GPU runs while the host launches, a CPU does both in turn."""
    return host + device if job.device.kind == "cpu" else max(host, device)


def input_time(job: Job, choice: Choice) -> PassTime:
    """Return the time of the work before the layers.

    The work is a look-up, the sum over the split vocabulary, and the gradient of the table.
    """
    first, stream, t = job.shape.input, job.device.stream, choice.layout.tensor_parallel_size
    nbytes = choice.samples * job.shape.runs[0][1].crossing
    products = [_products(job, choice, product) for product in first.products]
    table = (
        job.trained * first.table_elements(t) * (job.precision.weight + job.software.accumulation)
    )
    summed = gathered = 0.0
    if first.table[0]:
        group = group_link(choice.layout, job.cluster, "tensor")
        summed = (
            group.all_gather(nbytes)
            if choice.layout.sequence_parallel
            else group.all_reduce(nbytes)
        )
        gathered = group.all_gather(nbytes) if choice.layout.sequence_parallel else 0.0
    made = sum(one.weight_gradient for one in products)
    fresh = fresh_seconds(job, [nbytes])
    return PassTime(
        forward=sum(one.forward for one in products)
        + kept_on(choice, first.forward) / stream
        + fresh
        + summed,
        backward=made
        + (kept_on(choice, first.backward) + table) / stream
        + fresh
        + fresh_seconds(job, [first.table_elements(t) * job.precision.weight])
        + gathered,
        weight=made,
        communication=summed + gathered,
    )


def head_time(job: Job, choice: Choice) -> PassTime:
    """Return the time of the work after the layers: the output head and the loss."""
    head, stream, t = job.shape.head, job.device.stream, choice.layout.tensor_parallel_size
    products = [_products(job, choice, product) for product in head.products]
    group, forward, backward, exposed, gathered = (
        group_link(choice.layout, job.cluster, "tensor"),
        0.0,
        0.0,
        0.0,
        0.0,
    )
    weight = sum(one.weight_gradient for one in products)
    for product, one in zip(head.products, products, strict=True):
        forward, backward = forward + one.forward, backward + one.input_gradient
        weight += job.trained * product.elements(t) * job.software.accumulation / stream
        if product.cut == "outputs":
            nbytes = choice.samples * product.rows * product.inputs * job.precision.compute
            sequence = choice.layout.sequence_parallel
            gathered += group.all_gather(nbytes) if sequence else 0.0
            summed = group.all_gather(nbytes) if sequence else group.all_reduce(nbytes)
            exposed += (
                max(0.0, summed - one.weight_gradient)
                if job.software.hides_tensor and job.overlaps
                else summed
            )
    measured, logits = job.device.measured, 0.0
    if head.products:
        logits = choice.samples * head.products[-1].rows * head.products[-1].local(t)[0]
    loss = logits * job.software.loss / (stream if measured is None else measured.loss)
    # The logits, the logits minus their maximum, and their gradient.
    fresh = fresh_seconds(job, [logits * job.precision.compute])
    return PassTime(
        forward=forward + loss / 3 + 2 * fresh + gathered + kept_on(choice, head.forward) / stream,
        backward=backward
        + weight
        + 2 / 3 * loss
        + fresh
        + exposed
        + kept_on(choice, head.backward) / stream,
        weight=weight,
        communication=exposed + gathered,
    )


def _products(job: Job, choice: Choice, product: Product, *, float8: bool = False) -> _Products:
    """Return the time of (rows, inputs) times (inputs, outputs), and of its gradients."""
    device, width, rows = (
        job.device,
        job.precision.compute,
        max(1, round(choice.samples * product.rows)),
    )
    if product.cut == "rows":
        rows = max(1, rows // choice.layout.tensor_parallel_size)
    outputs, inputs = product.local(choice.layout.tensor_parallel_size)
    cast = cast_back = 0.0
    if float8 and product.weighted:
        # Each operand is read for its maximum and read again for the cast. Float8 products need the
        # summed dimension last, so the operands of the weight gradient are transposed.
        read, width = 2 * width + 1, 1
        cast = rows * inputs * read / device.stream
        cast_back = (rows * outputs * (read + 2) + rows * inputs * 2) / device.stream
    trained = job.trained if product.weighted else 1
    return _Products(
        forward=cast + product_time(device, width, rows, outputs, inputs),
        input_gradient=cast_back + product_time(device, width, rows, inputs, outputs),
        weight_gradient=trained * product_time(device, width, outputs, inputs, rows),
    )


def _accumulation(job: Job, choice: Choice, layer: LayerShape) -> float:
    """Return the seconds to add a layer's weight gradients to those of earlier microbatches.

    All experts of the rank count, regardless of their number of tokens.
    """
    elements = layer.elements(choice.layout.tensor_parallel_size)
    if layer.experts is not None:
        elements += layer.experts.local(choice.layout)
    return job.trained * elements * job.software.accumulation / job.device.stream


def _biases(job: Job, choice: Choice, layer: LayerShape) -> float:
    """Return the bytes of the biases that are added after the sums over ranks.

    The products cannot include these biases.
    """
    t = choice.layout.tensor_parallel_size
    if t == 1 or job.software.elementwise != "eager":
        return 0.0
    added = sum(
        product.rows * product.outputs
        for product in layer.products
        if product.cut == "inputs" and product.bias
    )
    return (
        choice.samples
        * added
        * 2
        * job.precision.compute
        / (t if choice.layout.sequence_parallel else 1)
    )


def _tensor_collectives(
    job: Job, choice: Choice, layer: LayerShape, products: Sequence[_Products]
) -> tuple[float, float, int]:
    """Return the waiting time of both passes, and the number of collectives per forward.

    Without sequence parallelism, each half of the layer has an all-reduce in each direction. If the
    software supports it, the backward's all-reduce runs at the same time as the product of the
    weight gradient. With sequence parallelism, the all-reduce becomes an all-gather and a
    reduce-scatter. The backward gathers the gradient first. The input's gather and the
    reduce-scatter run at the same time as products (``tensor_parallel/linear.py``).

    In a mixture, each rank has the whole sequence, sends a part of the tokens to the experts and
    gathers the results. If each expert is split, each rank sends all tokens, and the results are
    summed (``tensor_parallel/sharded_experts.py``).
    """
    group = group_link(choice.layout, job.cluster, "tensor")
    if group.size == 1:
        return 0.0, 0.0, 0
    hides, width = job.software.hides_tensor and job.overlaps, job.precision.compute
    forward = backward = 0.0
    count = 0
    for product, one in zip(layer.products, products, strict=True):
        enters = product.cut == "outputs" and product.enters
        if not enters and product.cut != "inputs":
            continue
        sequence = choice.layout.sequence_parallel and not product.whole
        nbytes = (
            choice.samples * product.rows * (product.inputs if enters else product.outputs) * width
        )
        each = group.all_gather(nbytes) if sequence else group.all_reduce(nbytes)
        beside = [one.input_gradient, one.weight_gradient] if sequence else [one.weight_gradient]
        if enters:
            backward += sum(max(0.0, each - hiding) if hides else each for hiding in beside)
        if sequence or not enters:
            forward, count = forward + each, count + 1
        if sequence and not enters:
            backward += each
    if layer.experts is not None:
        split = choice.layout.sequence_parallel
        nbytes = choice.samples * layer.products[0].rows * layer.experts.hidden * width
        whole = choice.layout.expert_tensor_parallel_size == 1
        joined = (
            group.all_gather(nbytes) if whole else group.all_reduce(nbytes)
        ) + split * group.all_gather(nbytes)
        forward, backward, count = forward + joined, backward + joined, 4
    return forward, backward, count


def _moved(job: Job, choice: Choice, layer: LayerShape) -> tuple[float, float]:
    """Return the seconds of a layer's passes to transpose the sequence for collectives.

    Collectives concatenate along the first dimension. Our sequence dimension is the second one, so
    it is moved to the front and back. This is a copy if there are several samples. The result of a
    collective is always a new tensor.
    """
    if not choice.layout.sequence_parallel or not job.software.batch_first:
        return 0.0, 0.0
    forward = backward = 0.0
    for product in layer.products:
        enters = product.cut == "outputs" and product.enters
        if enters or product.cut == "inputs":
            nbytes = (
                choice.samples
                * product.rows
                * (product.inputs if enters else product.outputs)
                * job.precision.compute
            )
            one = fresh_seconds(job, [nbytes])
            if choice.micro_batch_size > 1:
                one += 2 * nbytes / job.device.stream + fresh_seconds(job, [nbytes])
            forward, backward = forward + one, backward + (2 * one if enters else one)
    return forward, backward
