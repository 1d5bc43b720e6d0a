"""Names, parameters, datasets and models in the form that MLflow accepts."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_ptdp.base.data_record import DatasetRecord
from lightning_ptdp.base.errors import listed
from lightning_ptdp.base.requirements import import_optional
from lightning_ptdp.loggers.connection import quiet, set_defaults
from lightning_ptdp.loggers.tracking_store import sqlite_uri

if TYPE_CHECKING:  # imported when used
    from mlflow.entities import DatasetInput, Param


_NAME_LIMIT = 250
_VALUE_LIMIT = 500
_MAX_LISTED = 5
_DIGEST = 8  # characters, as in MLflow's own digests, which its list of runs shows after the name


def allowed_name(name: str) -> str:
    """Return ``name`` as MLflow accepts it: a relative path of some characters."""
    characters = re.sub(r"[^\w./: -]+", "_", name)
    parts = [part for part in characters.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:_NAME_LIMIT].rstrip("/") or "_"


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


# ---- Exported models: as the model of a run, and in the model registry ---------------------------


_DATABASE = "mlflow.db"
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
_CHATTY = (
    "mlflow.pytorch",
    "mlflow.transformers",
    "mlflow.utils.environment",
    "mlflow.store.model_registry.abstract_store",
)


def store_of(checkpoint: str | os.PathLike[str]) -> tuple[str, str] | None:
    """Return the tracking URI and the run of a checkpoint that ``MLFlowLogger`` placed.

    The result is None for any other checkpoint."""
    parents = Path(checkpoint).resolve().parents
    if len(parents) < 4 or not (parents[3] / _DATABASE).is_file():
        return None
    return sqlite_uri(parents[3] / _DATABASE), parents[1].name


def log_folder(
    folder: str | os.PathLike[str],
    *,
    tracking_uri: str,
    name: str | None = None,
    run_id: str | None = None,
    version_of: str = "",
) -> str:
    """Log a Hugging Face folder as the model of a run.

    The model is loaded into this process's memory. A language model with its tokenizer is stored as
    safetensors by ``mlflow.transformers``, which loads it as a pipeline. Any other model is stored
    by ``mlflow.pytorch`` as a pickle of transformers' class. Load such a model only from a store
    that you trust.

    Args:
        folder: Folder that ``AutoModel`` reads, with the name of the class in its ``config.json``.
        tracking_uri: Store or server.
        name: Also register it as the next version of this model.
        run_id: Run that made the folder; None: a new run.
        version_of: Source of the folder.

    Returns:
        The call that loads the model.
    """
    set_defaults()
    import mlflow

    transformers = import_optional("transformers")

    (kind,) = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).architectures
    model = getattr(transformers, kind).from_pretrained(folder)
    options = {"name": "model", "registered_model_name": name, "await_registration_for": None}
    mlflow.set_tracking_uri(tracking_uri)
    with (
        quiet(*_CHATTY),
        warnings.catch_warnings(),
        mlflow.start_run(run_id=run_id, run_name=f"export of {version_of or folder}"),
    ):
        warnings.simplefilter("ignore")
        if kind.endswith(_LANGUAGE_MODELS) and Path(folder, "tokenizer_config.json").is_file():
            components = {
                "model": model,
                "tokenizer": transformers.AutoTokenizer.from_pretrained(
                    folder, trust_remote_code=False
                ),
            }
            # Otherwise MLflow loads the model once more, in a new process, to see its imports.
            needs = mlflow.transformers.get_default_pip_requirements(model)
            info = mlflow.transformers.log_model(
                components, task="text-generation", pip_requirements=needs, **options
            )
            flavor = "transformers"
        else:
            needs = mlflow.pytorch.get_default_pip_requirements()
            info = mlflow.pytorch.log_model(
                model,
                serialization_format="pickle",
                pip_requirements=[*needs, f"transformers=={transformers.__version__}"],
                **options,
            )
            flavor = "pytorch"
    uri = info.model_uri if name is None else f"models:/{name}/{info.registered_model_version}"
    return f"mlflow.{flavor}.load_model('{uri}')"
