"""Names, parameters and datasets in the form that MLflow accepts."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING

from lightning_ptdp.base.data_record import DatasetRecord
from lightning_ptdp.base.errors import listed

if TYPE_CHECKING:  # imported when used
    from mlflow.entities import DatasetInput, Param


_VALUE_LIMIT = 500
_MAX_LISTED = 5
_DIGEST = 8  # characters, as in MLflow's own digests: its list of runs shows them beside the name


def allowed_name(name: str) -> str:
    """Return ``name`` in the characters that MLflow accepts."""
    return re.sub(r"[^\w./: -]+", "_", name)


_SPLITS = ("train", "val", "test")
_OF_TRAINING = ("learning_rate", "grad_norm", "expert_load", "dead_experts", "router_entropy")
_OF_SYSTEM = (
    "samples_per_s",
    "tokens_per_s",
    "model_tflops_per_s",
    "mfu",
    "goodput",
    "slowest_rank",
    "longest_wait",
)


def grouped_name(name: str) -> str:
    """Return a metric's name in MLflow, whose pages show metrics in groups by prefix.

    ``train_loss`` becomes ``train/loss``; validation has the prefix ``val/``, speed ``system/``.
    Other names are unchanged.
    """
    split, _, rest = name.partition("_")
    if split in _SPLITS and rest:
        return f"{split}/{rest}"
    if name.startswith(_OF_TRAINING):
        return f"train/{name}"
    return f"system/{name}" if name in _OF_SYSTEM else name


def flat_parameters(params: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the parameters as dotted keys and texts that MLflow accepts.

    Nested mappings, dataclasses and namespaces are flattened. None and Lightning's private keys
    (``_instantiator``) are left out."""
    if is_dataclass(params) and not isinstance(params, type):
        params = asdict(params)
    for key, value in (params if isinstance(params, Mapping) else vars(params)).items():
        if value is None or str(key).startswith("_"):
            continue
        name = allowed_name(f"{prefix}{key}")
        if (isinstance(value, Mapping) and value) or (
            is_dataclass(value) and not isinstance(value, type)
        ):
            yield from flat_parameters(value, f"{name}.")
        else:
            text = str(value)
            yield name, text if len(text) <= _VALUE_LIMIT else text[: _VALUE_LIMIT - 1] + "…"


def new_parameters(params: object, known: Mapping[str, str], run_id: str | None) -> list[Param]:
    """Return the parameters that a run does not have yet.

    Warns of parameters that the run has with another value, which MLflow never changes."""
    from mlflow.entities import Param

    parameters = dict(flat_parameters(params))
    changed = [
        f"{key} was {known[key]} and is now {parameters[key]}"
        for key in parameters
        if known.get(key, parameters[key]) != parameters[key]
    ]
    if changed:
        warnings.warn(
            f"run {run_id} continues with changed parameters, but MLflow keeps the first "
            f"values: {listed(changed, _MAX_LISTED, '; ')}",
            stacklevel=3,
        )
    return [Param(key, value) for key, value in parameters.items() if key not in known]


def as_input(dataset: DatasetRecord) -> DatasetInput:
    """Return the dataset as input of an MLflow run."""
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

    entity = Dataset(
        name=dataset.name,
        digest=dataset.digest[:_DIGEST],
        source_type="local",
        source=json.dumps(dataset.source),
        profile=json.dumps({**dataset.profile, "fingerprint": dataset.digest}),
    )
    return DatasetInput(entity, tags=[InputTag(MLFLOW_DATASET_CONTEXT, dataset.context)])
