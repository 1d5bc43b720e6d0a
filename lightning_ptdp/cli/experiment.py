"""Identity of an experiment: the options that a run and its continuation must share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule

from lightning_ptdp.cli.inheritance import leaves, short, value_at
from lightning_ptdp.data.stream_datamodule import StreamDataModule

__all__ = ["Experiment", "differences", "experiment_of"]

Experiment = dict[str, str]
"""Command-line name of each option -> its value as JSON."""

_SECTIONS = ("seed_everything", "model", "data", "init_from")
_TRAINER = (
    "precision",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "accumulate_grad_batches",
    "overfit_batches",
)
_STRATEGY = ("seed", "fp8")
_BATCH = ("samples per step", "samples per step and replica")
_NOT_IDENTIFYING = frozenset(
    {
        "model.loss_chunk_mb",
        "data.num_workers",
        "data.overwrite",
        "data.prepare_workers",
        "data.validation_samples",
        "data.verify_hashes",
    }
)
_BATCH_OPTIONS = frozenset(
    {"data.global_batch_size", "data.micro_batch_size", "data.num_microbatches"}
)


def experiment_of(
    values: Mapping[str, Any], datamodule: LightningDataModule | None, *, num_replicas: int
) -> Experiment:
    """Return the options that identify the experiment of a resolved configuration.

    Layout, devices, length of the training, logging and output are left out, because a continued
    run may change them.

    Args:
        values: The configuration with every default filled in.
        datamodule: The data module built from it.
        num_replicas: Number of replicas of its layout.
    """
    options = values["trainer"]
    strategy = options["strategy"] if isinstance(options["strategy"], Mapping) else {}
    chosen: dict[str, Any] = {name: values.get(name) for name in _SECTIONS}
    chosen["trainer"] = {name: options[name] for name in _TRAINER}
    chosen["trainer"]["strategy"] = {
        name: strategy.get("init_args", {}).get(name) for name in _STRATEGY
    }
    named = {}
    for path in leaves(chosen):
        value = value_at(chosen, path)
        name = ".".join(map(str, short(path)))
        if value is not None and name not in _NOT_IDENTIFYING:
            named[name] = _as_json(value)
    if isinstance(datamodule, StreamDataModule):
        plan = datamodule.batch_plans(num_replicas=num_replicas)[-1]
        named = {name: value for name, value in named.items() if name not in _BATCH_OPTIONS}
        named |= dict(
            zip(_BATCH, (_as_json(plan.global_batch), _as_json(plan.replica_batch)), strict=True)
        )
    return named


def differences(there: Mapping[str, Any], here: Experiment) -> list[str]:
    """Return the names of the options in which two experiments differ.

    If the number of replicas differs, either the batch of a step or the batch of a replica may
    differ.
    """
    differing = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    if all(name in differing for name in _BATCH):
        return differing
    return [name for name in differing if name not in _BATCH]


def _as_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)
