"""Seconds that one rank spends on a layer, or on the input or head of the model, per microbatch.

The time of a product follows from its shape (``pass_time.py``). The operations between products
take the time to read and write their bytes (``shapes.py``). Collectives of tensor parallelism add
the time that no concurrent product hides. If the host needs longer than this to launch all
operations, the host's time counts instead.
"""

from __future__ import annotations

from lightning_ptdp.planner.communication import (
    expert_collectives,
    group_link,
    late_biases,
    tensor_collectives,
    transposes,
)
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.pass_time import (
    NOTHING,
    PassTime,
    num_logits,
    product_passes,
    waits,
)
from lightning_ptdp.planner.replica_cost import sharding_time
from lightning_ptdp.planner.shapes import ExpertShape, LayerShape
from lightning_ptdp.planner.sublayer_cost import (
    attention_time,
    exchange_operations,
    expert_time,
    expert_traffic,
    local_experts,
)

_COLLECTIVE_OPERATIONS = 4
"""Operations that the host launches per collective."""
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
        product_passes(job, choice, product, float8=software.float8) for product in layer.products
    ]
    attention = sum((attention_time(job, choice, item) for item in layer.attentions), NOTHING)
    waiting, collectives = tensor_collectives(job, choice, layer.products, products)
    operations = software.operations + len(layer.attentions) * exchange_operations(choice)
    experts = NOTHING
    if layer.experts is not None:
        experts = _expert_passes(job, choice, layer.experts, stream)
        operations += _expert_operations(job, choice, layer.experts)
        sent, count = expert_collectives(job, choice, layer)
        collectives += count
        waiting += waits(sent, sent)
    accumulated = _accumulation(job, choice, layer)
    between = choice.bytes_of(layer.forward) + late_biases(job, choice, layer.products)
    elementwise = PassTime(
        forward=between / stream,
        backward=choice.bytes_of(layer.backward) / stream + accumulated,
        weight=accumulated,
    )
    copies = transposes(job, choice, layer.products)
    total = sum([*products, attention, elementwise, copies, waiting, experts], NOTHING)

    measured = job.device.measured
    operation_s = software.operation_s if measured is None else measured.operation_s
    host = operation_s * (operations + _COLLECTIVE_OPERATIONS * collectives)
    forward = _host_and_device(job, host, total.forward + experts.dispatch)
    backward = _host_and_device(job, 2 * host, total.backward + experts.dispatch)
    waiting_back = total.waiting_back
    recomputes = choice.recompute == "full"
    if recomputes:
        backward += forward
        waiting_back += total.waiting
    elif choice.recompute == "selective":
        if software.again is None:
            backward += attention.forward - attention.waiting
        else:
            backward += software.again * sum(time.forward for time in products) + between / stream
    forward *= software.slower
    backward *= software.slower
    gathered, scattered = sharding_time(job, choice, layer, forward, backward)
    return PassTime(
        forward=forward + gathered,
        backward=backward + scattered,
        weight=software.slower * total.weight,
        waiting=total.waiting + gathered,
        waiting_back=waiting_back + scattered,
        experts=(1 + recomputes) * experts.forward + experts.backward,
        dispatch=(2 + recomputes) * experts.dispatch,
    )


def _expert_passes(job: Job, choice: Choice, experts: ExpertShape, stream: float) -> PassTime:
    """Return the time of a layer's experts with the operations between their products."""
    read, read_back = expert_traffic(experts, job, choice)
    between = PassTime(forward=read / stream, backward=read_back / stream)
    return expert_time(experts, job, choice) + between


def _expert_operations(job: Job, choice: Choice, experts: ExpertShape) -> int:
    """Return the number of operations that the host launches for the forward of experts."""
    grouped = job.software.groups_products and job.device.kind == "cuda"
    calls = 1 if grouped else local_experts(experts, choice)
    return _DISPATCH_OPERATIONS + _EXPERT_OPERATIONS * calls


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
    elements = layer.elements(choice.t) + layer.expert_parameters(choice.layout)
    return job.trained * elements * job.software.accumulation / job.device.stream


# ---- Seconds that one rank spends on the ends of the model, per microbatch -----------------------


def input_time(job: Job, choice: Choice) -> PassTime:
    """Return the time of the work before the layers.

    The work is a look-up, the sum over the split vocabulary, and the gradient of the table.
    """
    first = job.shape.input
    stream = job.device.stream
    nbytes = choice.samples * job.shape.runs[0][1].crossing
    products = sum((product_passes(job, choice, item) for item in first.products), NOTHING)
    table = (
        job.trained
        * first.table_elements(choice.t)
        * (job.precision.weight + job.software.accumulation)
    )
    summed = gathered = 0.0
    if first.table[0]:
        group = group_link(choice.layout, job.cluster, "tensor")
        if choice.layout.sequence_parallel:
            summed = gathered = group.all_gather(nbytes)
        else:
            summed = group.all_reduce(nbytes)
    time = PassTime(
        forward=products.forward + choice.bytes_of(first.forward) / stream,
        # no gradient of the input
        backward=products.weight + (choice.bytes_of(first.backward) + table) / stream,
        weight=products.weight,
    )
    return time + waits(summed, gathered)


def head_time(job: Job, choice: Choice) -> PassTime:
    """Return the time of the work after the layers: the output head and the loss."""
    head = job.shape.head
    stream = job.device.stream
    products = [product_passes(job, choice, product) for product in head.products]
    waiting, _ = tensor_collectives(job, choice, head.products, products)
    accumulated = job.trained * head.elements(choice.t) * job.software.accumulation / stream
    measured = job.device.measured
    loss = num_logits(job, choice) * job.software.loss
    loss /= stream if measured is None else measured.loss
    elementwise = PassTime(
        forward=loss / 3 + choice.bytes_of(head.forward) / stream,
        backward=2 / 3 * loss + choice.bytes_of(head.backward) / stream + accumulated,
        weight=accumulated,
    )
    return sum([*products, elementwise, waiting], NOTHING)
