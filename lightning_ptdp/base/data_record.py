"""Record of the data that a run reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DatasetRecord:
    """A split of a data set.

    Attributes:
        name: Name of the data.
        context: "training" or "validation".
        digest: Equal for equal samples.
        source: Its location and its origin.
        profile: Its content, such as the numbers of samples and tokens.
    """

    name: str
    context: str
    digest: str
    source: Mapping[str, object]
    profile: Mapping[str, object]
