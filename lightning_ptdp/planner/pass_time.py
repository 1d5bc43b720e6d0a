"""Seconds of one microbatch in a part of the model, and of its products."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.product_duration import product_time
from lightning_ptdp.planner.shapes import Product

__all__ = ["NOTHING", "PassTime", "ProductTime", "product_passes"]


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
