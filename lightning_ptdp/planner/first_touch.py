"""Time to touch newly allocated memory on a CPU.

The system provides memory page by page and clears each page when it is first touched. The C library
keeps small blocks for later use and returns large blocks to the system. Large blocks are those
above 32 MiB (glibc's DEFAULT_MMAP_THRESHOLD_MAX), or above 1 MiB if there are several processes
(``shims/glibc.py``). Every large tensor that an operation creates therefore costs additional time.
The created tensors are::

    forward     each product's input (a norm's output, an activation's) and its result; the sum
                with the residual stream after a row-parallel layer
    backward    as many gradients; the attention's three, once more where they are concatenated
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
    """Return the seconds to touch new memory for tensors of ``sizes`` bytes."""
    measured = job.device.measured
    if measured is None or not measured.fresh_s:
        return 0.0
    least = LARGE_BLOCK if job.world_size > 1 else _KEPT
    return measured.fresh_s * sum(size for size in sizes if size >= least)


def layer_tensors(job: Job, choice: Choice, layer: LayerShape) -> tuple[list[float], list[float]]:
    """Return the bytes of the tensors that a layer's forward and its backward create.

    Tensors of experts are small and left out.
    """
    layout, samples, width = choice.layout, choice.samples, job.precision.compute
    t = layout.tensor_parallel_size
    divides = t if layout.sequence_parallel else 1
    forward, backward = list[float](), list[float]()
    for product in layer.products:
        outputs, inputs = (samples * product.rows * size * width for size in product.local(t))
        if product.cut == "inputs":
            stream = outputs / divides
            made = [inputs, outputs, stream]  # the last is the sum with the residual stream
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
    if t == 1:  # else they are added to the sum in place (matrix_product.py)
        backward += [product.elements() * job.precision.weight for product in layer.products]
    return forward, backward
