"""Plain numbers in modules that count something split: heads or features.

Most forwards read sizes from their tensors and need no change. Some store them: Hugging Face's
GPT-2 attention splits its fused projection by ``self.split_size``. A plan names such attributes,
and they are set to the value that is correct on a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from lightning_ptdp.tensor_parallel.patterns import matches


@dataclass(frozen=True, kw_only=True)
class PerRank:
    """A number that is divided by t: heads, or features of heads.

    Attributes:
        heads: Number of heads, if it may be smaller than t. Each rank then holds one head
            (``Column(copy_heads=True)``).
    """

    heads: int | None = None

    def parts(self, tensor_parallel_size: int) -> int:
        """Return the number of parts into which the number is divided."""
        return tensor_parallel_size if self.heads is None else min(self.heads, tensor_parallel_size)


@dataclass(frozen=True, kw_only=True)
class PerCopy:
    """A number of queries per key/value head; smaller if several ranks hold the same head.

    Attributes:
        heads: Number of key/value heads.
    """

    heads: int

    def parts(self, tensor_parallel_size: int) -> int:
        """Return the number of parts into which the number is divided."""
        return max(1, tensor_parallel_size // self.heads)


Number: TypeAlias = PerRank | PerCopy
"""Rule that adapts a number to one rank."""

Numbers: TypeAlias = Mapping[str, Mapping[str, Number]]


def local_numbers(
    model: nn.Module, numbers: Numbers, *, tensor_parallel_size: int
) -> list[tuple[nn.Module, str, Any]]:
    """Return (module, attribute, value on a rank) for each of the numbers.

    Raises:
        ValueError: A module has no such attribute, or its value does not divide.
    """
    local = []
    for pattern, attributes in numbers.items():
        for name, module in model.named_modules():
            for key, number in attributes.items() if matches(name, pattern) else ():
                if key not in vars(module):
                    raise ValueError(
                        f"the plan's numbers[{pattern!r}] names '{key}', which is not a plain "
                        f"attribute of '{name}' ({type(module).__name__}); it has: "
                        f"{', '.join(_plain(module)) or 'none'}"
                    )
                value = vars(module)[key]
                parts = number.parts(tensor_parallel_size)
                if value % parts:
                    raise ValueError(
                        f"'{name}': {key}={value} is not divisible by "
                        f"tensor_parallel_size={tensor_parallel_size}"
                    )
                local.append((module, key, value // parts))
    return local


def set_numbers(model: nn.Module, numbers: Numbers, *, tensor_parallel_size: int) -> None:
    """Set the numbers in place. Call it only once per model.

    Raises:
        ValueError: As in ``local_numbers``; no number is set then.
    """
    local = local_numbers(model, numbers, tensor_parallel_size=tensor_parallel_size)
    for module, key, value in local:
        setattr(module, key, value)


def _plain(module: nn.Module) -> list[str]:
    return sorted(
        key
        for key, value in vars(module).items()
        if isinstance(value, int) and not key.startswith("_")
    )
