"""Seconds that one rank spends on the ends of the model, per microbatch."""

from __future__ import annotations

from lightning_ptdp.planner.activations import kept_on
from lightning_ptdp.planner.communication import group_link
from lightning_ptdp.planner.first_touch import fresh_seconds
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.pass_time import PassTime, product_passes
from lightning_ptdp.planner.tensor_cost import tensor_collectives

__all__ = ["head_time", "input_time"]


def input_time(job: Job, choice: Choice) -> PassTime:
    """Return the time of the work before the layers.

    The work is a look-up, the sum over the split vocabulary, and the gradient of the table.
    """
    first, stream, t = job.shape.input, job.device.stream, choice.layout.tensor_parallel_size
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
    products = [product_passes(job, choice, product) for product in head.products]
    gathered, exposed, _ = tensor_collectives(job, choice, head.products, products)
    elements = sum(product.elements(t) for product in head.products)
    weight = sum(one.weight_gradient for one in products)
    weight += job.trained * elements * job.software.accumulation / stream
    logits = 0.0
    if head.products:
        logits = choice.samples * head.products[-1].rows * head.products[-1].local(t)[0]
    measured = job.device.measured
    loss = logits * job.software.loss / (stream if measured is None else measured.loss)
    # The logits, the logits minus their maximum, and their gradient.
    fresh = fresh_seconds(job, [logits * job.precision.compute])
    return PassTime(
        forward=sum(one.forward for one in products)
        + loss / 3
        + 2 * fresh
        + gathered
        + kept_on(choice, head.forward) / stream,
        backward=sum(one.input_gradient for one in products)
        + weight
        + 2 / 3 * loss
        + fresh
        + exposed
        + kept_on(choice, head.backward) / stream,
        weight=weight,
        communication=exposed + gathered,
    )
