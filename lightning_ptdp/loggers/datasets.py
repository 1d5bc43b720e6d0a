"""Datasets of a run as MLflow's dataset inputs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lightning_ptdp.base.data_record import DatasetRecord

if TYPE_CHECKING:  # imported when used
    from mlflow.entities import DatasetInput

__all__ = ["as_input"]

_DIGEST = 8  # characters, as in MLflow's own digests: its list of runs shows them beside the name


def as_input(dataset: DatasetRecord) -> DatasetInput:
    """Return the dataset as input of an MLflow run."""
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

    stored = Dataset(
        name=dataset.name,
        digest=dataset.digest[:_DIGEST],
        source_type="local",
        source=json.dumps(dataset.source),
        profile=json.dumps({**dataset.profile, "fingerprint": dataset.digest}),
    )
    return DatasetInput(stored, tags=[InputTag(MLFLOW_DATASET_CONTEXT, dataset.context)])
