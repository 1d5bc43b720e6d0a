"""Record of the data that a run reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WORKING_FOLDER = "working_folder"
"""Key of the working directory in the state of a data module."""


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


class DescribedData:
    """Base of data modules that describe their data.

    A base, not only a method, because users' data modules often have an attribute ``datasets``.
    """

    def datasets(self) -> list[DatasetRecord]:
        """Return records of the data for training and validation; by default none."""
        return []


def records_of(datamodule: object) -> list[DatasetRecord]:
    """Return the records of a data module; empty if it does not describe its data."""
    return datamodule.datasets() if isinstance(datamodule, DescribedData) else []
