"""Seconds that one rank spends on a layer or an end of the model, per microbatch.

The device computes products by their shapes (``pass_time.py``), and reads and writes the
bytes of the operations between them (``shapes.py``). Collectives of tensor parallelism add the time
that no concurrent product hides. If the host needs longer to launch all of it, the host's time
counts.
"""

from __future__ import annotations

from lightning_ptdp.planner.activations import kept_on
from lightning_ptdp.planner.attention_cost import attention_time, exchange_operations
from lightning_ptdp.planner.communication import (
    expert_collectives,
    group_link,
    late_biases,
    tensor_collectives,
    transposes,
)
from lightning_ptdp.planner.expert_cost import expert_time, expert_traffic, local_experts
from lightning_ptdp.planner.expert_shape import ExpertShape
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.parameters import sharding_time
from lightning_ptdp.planner.pass_time import (
    NOTHING,
    PassTime,
    product_passes,
)
from lightning_ptdp.planner.shapes import LayerShape

_DISPATCH_OPERATIONS = 50
_EXPERT_OPERATIONS = 5
"""Operations of a dispatch and of one call to experts.

They are counted in ``expert_parallel/dispatch.py`` and a router. A dispatch has scores, choice,
order, counts, two exchanges and the weighted sum. Each call has two products, the gate's activation
and its product.
"""


def layer_time(job: Job, choice: Choice, layer: LayerShape | None = None) -> PassTime:
    """Return the time of one layer; None means the model's first layer."""
    layer = layer or job.shape.runs[0][1]
    software = job.software
    stream = _layer_stream(job, layer)
    products = [
        product_passes(job, choice, product, float8=job.software.float8)
        for product in layer.products
    ]
    cores = [attention_time(job, choice, attention) for attention in layer.attentions]
    core, core_backward, exposed, exposed_backward = (
        (sum(parts) for parts in zip(*cores, strict=True)) if cores else (0.0,) * 4
    )
    sent, sent_backward, collectives = tensor_collectives(job, choice, layer.products, products)
    if layer.experts is not None:
        expert_sent, count = expert_collectives(job, choice, layer)
        collectives += count
        sent = sent + expert_sent
        sent_backward = sent_backward + expert_sent
    moved, moved_backward = transposes(job, choice, layer.products)
    experts, travel, operations = (
        (NOTHING, 0.0, 0) if layer.experts is None else _experts(job, choice, layer, layer.experts)
    )

    measured = job.device.measured
    operation_s = software.operation_s if measured is None else measured.operation_s
    operations += software.operations + len(layer.attentions) * exchange_operations(choice)
    host = operation_s * (operations + collectives * software.collective_operations)
    between = kept_on(choice, layer.forward) + late_biases(job, choice, layer.products)
    between_backward = kept_on(choice, layer.backward)
    forward = (
        sum(time.forward for time in products) + core + between / stream + moved + sent + exposed
    )
    forward += experts.forward + travel
    forward = _host_and_device(job, host, forward)
    waited = sent + exposed
    weight = (
        sum(time.weight_gradient for time in products)
        + experts.weight
        + _accumulation(job, choice, layer)
    )
    backward = (
        sum(time.input_gradient for time in products)
        + weight
        + core_backward
        + between_backward / stream
    )
    backward += experts.backward - experts.weight + travel
    backward = _host_and_device(
        job, 2 * host, backward + moved_backward + sent_backward + exposed_backward
    )
    recomputes = choice.recompute == "full"
    if recomputes:
        backward = backward + forward
        waited = 2 * waited
    elif choice.recompute == "selective":
        backward += _selected(job, sum(time.forward for time in products), core, between / stream)
    forward, backward, weight = (
        software.slower * seconds for seconds in (forward, backward, weight)
    )
    gathered, scattered = sharding_time(job, choice, layer, forward, backward)
    return PassTime(
        forward=forward + gathered,
        backward=backward + scattered,
        weight=weight,
        communication=waited + sent_backward + exposed_backward + gathered + scattered,
        experts=(1 + recomputes) * experts.forward + experts.backward,
        dispatch=(2 + recomputes) * travel,
    )


def _selected(job: Job, products: float, attention: float, between: float) -> float:
    """Return the seconds of the operations that selective recomputation repeats."""
    share = job.software.again
    return attention if share is None else share * products + between


def _experts(
    job: Job, choice: Choice, layer: LayerShape, experts: ExpertShape
) -> tuple[PassTime, float, int]:
    """Return the times of a layer's experts.

    The result is (products and the operations between them; all-to-alls of one direction;
    number of operations of a forward).
    """
    time = expert_time(experts, job, choice)
    traffic = expert_traffic(experts, job, choice)
    stream = _layer_stream(job, layer)
    passes = PassTime(
        forward=time.forward + traffic[0] / stream,
        backward=time.backward + traffic[1] / stream,
        weight=time.weight,
    )
    calls = (
        1
        if job.software.groups_products and job.device.kind == "cuda"
        else local_experts(experts, choice)
    )
    return passes, time.dispatch, _DISPATCH_OPERATIONS + _EXPERT_OPERATIONS * calls


def _layer_stream(job: Job, layer: LayerShape) -> float:
    measured = job.device.measured
    return measured.gated if measured is not None and layer.gated else job.device.stream


def _host_and_device(job: Job, host: float, device: float) -> float:
    """Combine host and device: a GPU runs while the host launches, a CPU does both in turn."""
    return host + device if job.device.kind == "cpu" else max(host, device)


def _accumulation(job: Job, choice: Choice, layer: LayerShape) -> float:
    """Return the seconds to add a layer's weight gradients to those of earlier microbatches.

    All experts of the rank count, regardless of their number of tokens.
    """
    elements = layer.elements(choice.layout.tensor_parallel_size)
    if layer.experts is not None:
        elements += layer.experts.local(choice.layout)
    return job.trained * elements * job.software.accumulation / job.device.stream


# ---- Seconds that one rank spends on the ends of the model, per microbatch -----------------------


def input_time(job: Job, choice: Choice) -> PassTime:
    """Return the time of the work before the layers.

    The work is a look-up, the sum over the split vocabulary, and the gradient of the table.
    """
    first = job.shape.input
    stream = job.device.stream
    t = choice.layout.tensor_parallel_size
    nbytes = choice.samples * job.shape.runs[0][1].crossing
    products = [product_passes(job, choice, product) for product in first.products]
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
    weight = sum(time.weight_gradient for time in products)
    return PassTime(
        forward=sum(time.forward for time in products)
        + kept_on(choice, first.forward) / stream
        + summed,
        backward=weight + (kept_on(choice, first.backward) + table) / stream + gathered,
        weight=weight,
        communication=summed + gathered,
    )


def head_time(job: Job, choice: Choice) -> PassTime:
    """Return the time of the work after the layers: the output head and the loss."""
    head = job.shape.head
    stream = job.device.stream
    t = choice.layout.tensor_parallel_size
    products = [product_passes(job, choice, product) for product in head.products]
    gathered, exposed, _ = tensor_collectives(job, choice, head.products, products)
    elements = sum(product.elements(t) for product in head.products)
    weight = sum(time.weight_gradient for time in products)
    weight += job.trained * elements * job.software.accumulation / stream
    logits = 0.0
    if head.products:
        logits = choice.samples * head.products[-1].rows * head.products[-1].local(t)[0]
    measured = job.device.measured
    loss = logits * job.software.loss / (stream if measured is None else measured.loss)
    return PassTime(
        forward=sum(time.forward for time in products)
        + loss / 3
        + gathered
        + kept_on(choice, head.forward) / stream,
        backward=sum(time.input_gradient for time in products)
        + weight
        + 2 / 3 * loss
        + exposed
        + kept_on(choice, head.backward) / stream,
        weight=weight,
        communication=exposed + gathered,
    )
