"""A weight as replicas that share it gather it for products in float8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from lightning_ptdp.shims.quantization import Recipe


@dataclass(eq=False)
class RoundedWeight:
    """A weight in float8 with its scale.

    Attributes:
        recipe: Recipe of the rounding.
        fetch: Gathers the values.
        used: Products use these values; otherwise they round the weight itself.
        values: In the weight's shape, float8; None while they are freed.
        scale: () float32, by which the weight was multiplied before it was rounded.
    """

    recipe: Recipe
    fetch: Callable[[], None] = field(init=False)
    used: bool = True
    values: Tensor | None = None
    scale: Tensor | None = None

    def read(self) -> tuple[Tensor, Tensor]:
        """Return values and scale; values that are freed are gathered."""
        if self.values is None:
            self.fetch()
        assert self.values is not None
        assert self.scale is not None
        return self.values, self.scale
