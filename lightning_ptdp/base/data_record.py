"""Record of the data that a run reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DatasetRecord"]


@dataclass(frozen=True, kw_only=True)
class DatasetRecord:
    """A split of some data.

    Attributes:
        name: Of the data.
        context: "training" or "validation".
        digest: Equal for equal samples.
        source: Where it lies and what it was made from.
        profile: What is in it, such as its samples and tokens.
    """

    name: str
    context: str
    digest: str
    source: Mapping[str, object]
    profile: Mapping[str, object]
