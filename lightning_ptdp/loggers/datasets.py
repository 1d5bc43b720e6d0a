"""What a run reads, in MLflow's words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lightning_ptdp.data_record import DatasetRecord

if TYPE_CHECKING:  # imported when it is used
    from mlflow.entities import DatasetInput

__all__ = ["as_input"]

_DIGEST = 36  # characters that MLflow takes


def as_input(dataset: DatasetRecord) -> DatasetInput:
    """As a run takes it."""
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

    stored = Dataset(
        name=dataset.name,
        digest=dataset.digest[:_DIGEST],
        source_type="local",
        source=json.dumps(dataset.source),
        profile=json.dumps(dataset.profile),
    )
    return DatasetInput(stored, tags=[InputTag(MLFLOW_DATASET_CONTEXT, dataset.context)])
