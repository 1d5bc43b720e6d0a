"""Exported models in MLflow: as the model of a run, and in the model registry."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from lightning_ptdp.base.requirements import import_optional
from lightning_ptdp.loggers.connection import quiet, set_defaults
from lightning_ptdp.loggers.tracking_store import sqlite_uri

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
            info = mlflow.transformers.log_model(components, task="text-generation", **options)
            flavor = "transformers"
        else:
            info = mlflow.pytorch.log_model(model, serialization_format="pickle", **options)
            flavor = "pytorch"
    uri = info.model_uri if name is None else f"models:/{name}/{info.registered_model_version}"
    return f"mlflow.{flavor}.load_model('{uri}')"
