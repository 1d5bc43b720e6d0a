"""Seconds for memory that a process has just been given, on a CPU.

The system hands it out page by page, each cleared when it is first touched. The C library keeps
small blocks for their next use, and gives
large ones back: those above 32 MiB (glibc's DEFAULT_MMAP_THRESHOLD_MAX), and where there are
several processes those above 1 MiB (``shims/glibc.py``). So every large tensor that an operation
makes costs that much besides. Tensors that are made::

    forward     each product's input (a norm's output, an activation's) and its result; the sum with the stream behind a row layer
    backward    as many gradients; the attention's three, once more where they are put together
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_ptdp.planner.attention_cost import input_bytes
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.shapes import LayerShape
from lightning_ptdp.shims.glibc import LARGE_BLOCK

__all__ = ["fresh_seconds", "layer_tensors"]

_KEPT = 32 * 2**20


def fresh_seconds(job: Job, sizes: Iterable[float]) -> float:
    """Return the time of touching new memory for tensors of ``sizes`` bytes."""
    measured = job.device.measured
    if measured is None or not measured.fresh_s:
        return 0.0
    least = LARGE_BLOCK if job.world_size > 1 else _KEPT
    return measured.fresh_s * sum(size for size in sizes if size >= least)


def layer_tensors(job: Job, choice: Choice, layer: LayerShape) -> tuple[list[float], list[float]]:
    """Bytes of the tensors that a layer's forward makes, and its backward; those of experts are
    small ones."""
    layout, samples, width = choice.layout, choice.samples, job.precision.compute
    t = layout.tensor_parallel_size
    divides = t if layout.sequence_parallel else 1
    forward, backward = list[float](), list[float]()
    for product in layer.products:
        outputs, inputs = (samples * product.rows * size * width for size in product.local(t))
        if product.cut == "inputs":
            stream = outputs / divides
            made = [inputs, outputs, stream]  # the sum with the stream is the last
            forward += [stream] if product.bias and t > 1 else []
        else:
            made = (
                [inputs / divides, outputs]
                if product.enters or product.cut == "none"
                else [outputs]
            )
        forward += made
        backward += made
    for attention in layer.attentions:
        backward.append(input_bytes(job, choice, attention))
    if t == 1:  # else they are added where the sum is (matrix_product.py)
        backward += [product.elements() * job.precision.weight for product in layer.products]
    return forward, backward
