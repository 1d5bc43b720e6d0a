"""Cost of tensor parallelism: collectives that nothing hides, copies around them, late biases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_ptdp.planner.communication import group_link
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.pass_time import ProductTime
from lightning_ptdp.planner.shapes import LayerShape, Product

__all__ = ["expert_collectives", "late_biases", "tensor_collectives", "transposes"]


def tensor_collectives(
    job: Job, choice: Choice, products: Sequence[Product], times: Sequence[ProductTime]
) -> tuple[float, float, int]:
    """Return the waiting time of both passes, and the number of collectives per forward.

    Without sequence parallelism, each half of the layer has an all-reduce in each direction. If the
    software supports it, the backward's all-reduce runs at the same time as the product of the
    weight gradient. With sequence parallelism, the all-reduce becomes an all-gather and a
    reduce-scatter. The backward gathers the gradient first. The input's gather and the
    reduce-scatter run at the same time as products (``tensor_parallel/parallel_product.py``).
    """
    group = group_link(choice.layout, job.cluster, "tensor")
    hides = job.software.hides_tensor and job.overlaps
    forward = backward = 0.0
    count = 0
    if group.size == 1:
        return forward, backward, count
    for product, time in zip(products, times, strict=True):
        nbytes = _shared_bytes(job, choice, product)
        if not nbytes:
            continue
        enters = product.cut == "outputs"
        sequence = choice.layout.sequence_parallel and not product.whole
        seconds = group.all_gather(nbytes) if sequence else group.all_reduce(nbytes)
        if enters:
            passes = [time.weight_gradient, *([time.input_gradient] if sequence else [])]
            backward += sum(max(0.0, seconds - hiding) if hides else seconds for hiding in passes)
        elif sequence:
            backward += seconds
        if sequence or not enters:
            forward, count = forward + seconds, count + 1
    return forward, backward, count


def expert_collectives(job: Job, choice: Choice, layer: LayerShape) -> tuple[float, int]:
    """Return the waiting time of one pass of a layer's experts, and its number of collectives.

    Each tensor-parallel rank has the whole sequence, sends a part of the tokens to the experts and
    gathers the results. If each expert is split, each rank sends all tokens, and the results are
    summed (``tensor_parallel/sharded_experts.py``).
    """
    group = group_link(choice.layout, job.cluster, "tensor")
    if layer.experts is None or group.size == 1:
        return 0.0, 0
    nbytes = choice.samples * layer.products[0].rows * layer.experts.hidden * job.precision.compute
    unsplit = choice.layout.expert_tensor_parallel_size == 1
    seconds = group.all_gather(nbytes) if unsplit else group.all_reduce(nbytes)
    if not choice.layout.sequence_parallel:
        return seconds, 1
    return seconds + group.all_gather(nbytes), 2


def transposes(job: Job, choice: Choice, products: Iterable[Product]) -> tuple[float, float]:
    """Return the seconds of a layer's passes to transpose the sequence for collectives.

    Collectives concatenate along the first dimension. Our sequence dimension is the second one, so
    it is moved to the front and back. This is a copy if there are several samples.
    """
    forward = backward = 0.0
    if not choice.layout.sequence_parallel or not job.software.batch_first:
        return forward, backward
    for product in products:
        seconds = 0.0
        if choice.micro_batch_size > 1:
            seconds = 2 * _shared_bytes(job, choice, product) / job.device.stream
        forward += seconds
        backward += 2 * seconds if product.cut == "outputs" else seconds
    return forward, backward


def late_biases(job: Job, choice: Choice, products: Iterable[Product]) -> float:
    """Return the bytes of the biases that are added after the sums over ranks.

    The products cannot include these biases.
    """
    t = choice.layout.tensor_parallel_size
    if t == 1 or job.software.elementwise != "eager":
        return 0.0
    added = sum(
        _shared_bytes(job, choice, product)
        for product in products
        if product.cut == "inputs" and product.bias
    )
    return 2 * added / (t if choice.layout.sequence_parallel else 1)


def _shared_bytes(job: Job, choice: Choice, product: Product) -> float:
    """Return the bytes that tensor-parallel ranks gather or sum around a product.

    They are the input of the first of several column layers, or the output of a row layer.
    """
    channels = {"outputs": product.inputs * product.enters, "inputs": product.outputs}
    rows = choice.samples * product.rows
    return rows * channels.get(product.cut, 0) * job.precision.compute
