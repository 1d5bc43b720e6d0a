"""Bytes per element under Lightning's precisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lightning_ptdp.base.errors import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes per element under one of Lightning's precisions.

    Attributes:
        name: Lightning's ``precision``.
        weight: Bytes of a parameter.
        compute: Bytes of the operands and results of matrix products.
        residual: Bytes of the residual stream between blocks, which autocast does not cast.
        gradient: Bytes of an accumulated gradient.
        state: Bytes of the optimizer's state: two moments of Adam, and a master copy of a parameter
            in half precision.
    """

    name: str
    weight: int
    compute: int
    residual: int
    gradient: int = 4
    state: int

    @property
    def casts(self) -> bool:
        """Return True if parameters are cast for each use (autocast)."""
        return self.weight != self.compute


_SINGLE = {"weight": 4, "compute": 4, "residual": 4, "state": 8}
_MIXED = {"weight": 4, "compute": 2, "residual": 4, "state": 8}
_HALF = {"weight": 2, "compute": 2, "residual": 2, "state": 12}
_BYTES = {
    "32-true": _SINGLE,
    "bf16-mixed": _MIXED,
    "bf16-true": _HALF,
    "16-mixed": _MIXED,
    "16-true": _HALF,
}
PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {name: Precision(name=name, **sizes) for name, sizes in _BYTES.items()}
)
"""Precisions by Lightning's names.

Half precision throughout takes 18 bytes per parameter, or 6 + 12/d with a sharded optimizer. The
other precisions take 16, or 8 + 8/d.
"""


def find_precision(name: str, *, states: str = "float32") -> Precision:
    """Return the precision called ``name``.

    Args:
        name: Lightning's name; ``"32"`` and ``"bf16"`` have the same meaning as in Lightning.
        states: Type of Adam's moments (``AdamWConfig.states``).

    Raises:
        ValueError: There is no such precision. The message names the nearest one.
    """
    full = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}.get(str(name), str(name))
    if full not in PRECISIONS:
        raise ValueError(
            f"precision={name!r} is unknown to the planner. {did_you_mean(full, PRECISIONS)}It supports "
            f"{', '.join(PRECISIONS)}"
        )
    found = PRECISIONS[full]
    return replace(found, state=found.state - 4) if states == "bfloat16" else found
