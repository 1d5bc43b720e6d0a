"""Seconds of one microbatch in a part of the model, and of its products."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_ptdp.planner.attention_cost import input_bytes
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.product_duration import product_time
from lightning_ptdp.planner.shapes import LayerShape, Product
from lightning_ptdp.shims.glibc import LARGE_BLOCK

__all__ = ["NOTHING", "PassTime", "ProductTime", "fresh_seconds", "layer_tensors", "product_passes"]


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
class ProductTime:
    """Seconds of one product and of the products of its backward."""

    forward: float
    input_gradient: float
    weight_gradient: float


def product_passes(
    job: Job, choice: Choice, product: Product, *, float8: bool = False
) -> ProductTime:
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
    return ProductTime(
        forward=cast + product_time(device, width, rows, outputs, inputs),
        input_gradient=cast_back + product_time(device, width, rows, inputs, outputs),
        weight_gradient=trained * product_time(device, width, outputs, inputs, rows),
    )


# ---- Time to touch newly allocated memory on a CPU -----------------------------------------------
#
# The system provides memory page by page and clears each page when it is first touched. The C library
# keeps small blocks for later use and returns large blocks to the system. Large blocks are those
# above 32 MiB (glibc's DEFAULT_MMAP_THRESHOLD_MAX), or above 1 MiB if there are several processes
# (``shims/glibc.py``). Every large tensor that an operation creates therefore costs additional time.
# The created tensors are::
#
#     forward     each product's input (a norm's output, an activation's) and its result; the sum
#                 with the residual stream after a row-parallel layer
#     backward    as many gradients; the attention's three, once more where they are concatenated


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
            sizes = [inputs, outputs, stream]  # the last is the sum with the residual stream
            forward += [stream] if product.bias and t > 1 else []
        else:
            sizes = (
                [inputs / divides, outputs]
                if product.enters or product.cut == "none"
                else [outputs]
            )
        forward += sizes
        backward += sizes
    for attention in layer.attentions:
        backward.append(input_bytes(job, choice, attention))
    if t == 1:  # else they are added to the sum in place (matrix_product.py)
        backward += [product.elements() * job.precision.weight for product in layer.products]
    return forward, backward
