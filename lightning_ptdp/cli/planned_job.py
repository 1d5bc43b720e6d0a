"""The job that ``ptdp plan`` estimates: its model, its batch and its device.

The model is given by sizes, a recipe, a Hugging Face folder or any LightningModule.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_ptdp.base.option_types import nearest
from lightning_ptdp.cli.failures import UserError
from lightning_ptdp.world.axes import AXES

if TYPE_CHECKING:
    from lightning_ptdp.models.model_config import BertConfig, GPTConfig
    from lightning_ptdp.planner import Device, Job, ModelShape


# option -> (field of GPTConfig, help text)
SIZES = {
    "layers": ("num_layers", "l, transformer layers"),
    "hidden": ("hidden_size", "h, width of the residual stream"),
    "heads": ("num_heads", "attention heads"),
    "kv-heads": ("num_kv_heads", "key/value heads"),
    "ffn": ("ffn_hidden_size", "f, inner width of the feed-forward part"),
    "vocabulary": ("vocabulary_size", "V, token ids"),
    "sequence": ("sequence_length", "s, tokens per sequence"),
    "experts": ("num_experts", "E, experts per layer; implies the Llama architecture"),
    "experts-per-token": ("experts_per_token", "k, active experts per token"),
    "shared-experts": ("shared_experts", "experts that process all tokens"),
    "expert-ffn": ("expert_hidden_size", "inner width of an expert"),
    "dense-layers": ("dense_layers", "number of first layers without experts"),
}

Config: TypeAlias = Mapping[str, Any]
"""Values of a configuration, or of a part of it."""

_NEEDED = ("layers", "hidden", "heads", "sequence")


def planned_job(options: Namespace, config: Config) -> Job:
    """Return the job that the command line and the configuration describe.

    Raises:
        UserError: There is no model that can be planned, or no batch size.
        ValueError: A size, device or precision is invalid.
    """
    from lightning_ptdp.planner import RESERVE, Job, find_precision, find_software

    trainer = config.get("trainer") or {}
    device = _device(options)
    precision = str(
        options.precision
        or trainer.get("precision")
        or ("32-true" if device.kind == "cpu" else "bf16-true")
    )
    model: GPTConfig | BertConfig | ModelShape
    trained = 1.0
    is_foreign = _is_foreign(options, config)
    if is_foreign:
        model, trained = _followed(options, config, device=device, precision=precision)
    else:
        model = _model(options, config)
    optimizer = _inner(config, "model").get("optimizer")
    states = optimizer.get("states") if isinstance(optimizer, Mapping) else None
    job = Job(
        model=model,
        world_size=options.world,
        global_batch_size=_batch(options, config),
        device=device,
        precision=find_precision(precision, states=str(states)),
        software=find_software(options.software),
        sequence_length=options.sequence_length
        or _inner(config, "data").get("sequence_length")
        or model.sequence_length,
        imbalance=options.imbalance,
        trained=trained,
        offloads_optimizer=bool(_inner(trainer, "strategy").get("offload_optimizer")),
        reserve=RESERVE if options.reserve is None else options.reserve,
    )
    return job if is_foreign else _with_adapters(job, config)


def _is_foreign(options: Namespace, config: Config) -> bool:
    """Return True if the configured class cannot be described as a GPT.

    This holds for classes of the user and for models with images.
    """
    path = str((config.get("model") or {}).get("class_path", ""))
    is_ours = path.startswith("lightning_ptdp.") and not path.endswith("LitImageTextToText")
    return "." in path and not is_ours and not _sizes(options).keys() - {"sequence_length"}


def _followed(
    options: Namespace, config: Config, *, device: Device, precision: str
) -> tuple[GPTConfig | BertConfig | ModelShape, float]:
    """Return the sizes of the configuration's LightningModule, and the share that is trained.

    The module is built on the meta device, and its forward is traced without data.
    """
    import torch
    from jsonargparse import ArgumentError, ArgumentParser
    from lightning.pytorch import LightningModule

    from lightning_ptdp.config import PTDPConfig
    from lightning_ptdp.planner import find_precision
    from lightning_ptdp.strategy.checks.model import full_model
    from lightning_ptdp.strategy.planning import described, trained_share

    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    arguments = {
        "model": {
            key: value
            for key, value in config["model"].items()
            if key in ("class_path", "init_args")
        }
    }
    try:
        parsed = parser.parse_object(arguments)
        with torch.device("meta"):
            module = parser.instantiate_classes(parsed).model
        full = full_model(module, PTDPConfig())
    except (ArgumentError, ImportError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{options.config}: {config['model']['class_path']} cannot be built without values: "
            f"{reason}"
        ) from error
    length = options.sequence_length or _inner(config, "data").get("sequence_length")
    sizes = described(
        full,
        PTDPConfig(),
        length=length,
        precision=precision,
        software=options.software,
        device=device,
    )
    return sizes, trained_share(full, find_precision(precision).weight)


def _model(options: Namespace, config: Config) -> GPTConfig | BertConfig:
    from lightning_ptdp.models.model_config import BertConfig, GPTConfig
    from lightning_ptdp.models.pretrained_config import config_of_sizes
    from lightning_ptdp.planner import gpt_sizes

    size_options = _sizes(options)
    missing = [f"--{name}" for name in _NEEDED if SIZES[name][0] not in size_options]
    inner = _inner(config, "model")
    sizes = inner.get("config")
    path = inner.get("path") if sizes is None and missing else None
    if options.model or path:
        return dataclasses.replace(_of_path(str(options.model or path)), **size_options)
    if sizes is None and not missing:
        if options.llama or "num_experts" in size_options:
            return GPTConfig.llama(**size_options)
        return GPTConfig.gpt2(**size_options)
    if not config:
        raise UserError(
            "there is no model. Use --recipe, --config or --model, or also set "
            f"{', '.join(missing)}"
        )
    if isinstance(sizes, Mapping) and "model_type" in sizes:
        return dataclasses.replace(gpt_sizes(config_of_sizes(sizes).to_dict()), **size_options)
    is_bert = str((config.get("model") or {}).get("class_path", "")).endswith("LitBert")
    kind = BertConfig if is_bert else GPTConfig
    fields = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(sizes, Mapping):
        raise UserError(
            f"{options.config} has no model.init_args.config. Give the sizes as options, such "
            "as --layers 24 --hidden 2048"
        )
    for name in {**sizes, **size_options}:
        if name not in fields:
            raise UserError(
                f"{options.config}: model.config.{name} is not a size of a "
                f"{'BERT' if is_bert else 'GPT'}{nearest(name, fields)}"
            )
    return kind(**{**sizes, **size_options})


def _sizes(options: Namespace) -> dict[str, Any]:
    """Return the sizes on the command line, by their fields of GPTConfig."""
    fields = ((field, getattr(options, field)) for field, _ in SIZES.values())
    return {field: value for field, value in fields if value is not None}


def _of_path(path: str) -> GPTConfig | BertConfig:
    """Return the sizes of a Hugging Face model. Only ``config.json`` is read."""
    from lightning_ptdp.models.pretrained_config import config_values
    from lightning_ptdp.planner import gpt_sizes

    try:
        return gpt_sizes(config_values(path))
    except ValueError as error:
        prefix = "" if str(error).startswith("path=") else f"path={path!r}: "
        remedy = (
            ""
            if "as options" in str(error)
            else ". Or give the sizes as options, such as --layers 24 --hidden 2048"
        )
        raise UserError(f"{prefix}{error}{remedy}") from error


def _with_adapters(job: Job, config: Config) -> Job:
    """Return the job with a frozen base model if the configuration trains adapters.

    An adapter of rank r on a matrix (o, i) has r (o + i) parameters. Every matrix of the layers is
    assumed to have an adapter.
    """
    adapter = _inner(config, "model").get("adapter")
    if not isinstance(adapter, Mapping):
        return job
    if adapter.get("modules_to_save"):
        print(
            "ptdp: adapter.modules_to_save is planned as frozen. Leave memory for its "
            "gradients and optimizer state",
            file=sys.stderr,
        )
    products = [
        (count, product)
        for count, layer in job.shape.runs
        for product in layer.products
        if product.weighted
    ]
    added = adapter.get("r", 8) * sum(
        count * (product.outputs + product.inputs) for count, product in products
    )
    return dataclasses.replace(job, trained=min(1.0, added / job.shape.parameters))


def _batch(options: Namespace, config: Config) -> int:
    """Return the number of sequences per step.

    Without ``--batch``, it follows from the configuration's data and its number of replicas.
    """
    if options.batch is not None:
        return int(options.batch)
    data = _inner(config, "data")
    trainer = config.get("trainer") or {}
    accumulated = trainer.get("accumulate_grad_batches", 1)
    if data.get("global_batch_size"):
        return int(data["global_batch_size"] * accumulated)
    if not data.get("micro_batch_size"):
        raise UserError(
            "the size of a step is unknown. Set --batch, the number of sequences over all replicas"
        )
    layout = _inner(trainer, "strategy")
    devices = trainer.get("devices")
    if isinstance(devices, list):
        devices = len(devices)
    if isinstance(devices, str) and devices.isdigit():
        devices = int(devices)
    if not isinstance(devices, int) or devices < 1:
        raise UserError(
            f"the size of a step is unknown, because trainer.devices={devices} does not give the "
            "number of replicas. Set --batch, the number of sequences over all replicas"
        )
    replica = math.prod(
        layout.get(f"{axis.name}_parallel_size", 1)
        for axis in AXES
        if axis.name != "data" and axis.within is None
    )
    replicas = max(1, devices * trainer.get("num_nodes", 1) // replica)
    microbatches = data.get("num_microbatches") or 1
    return int(data["micro_batch_size"] * microbatches * replicas * accumulated)


def _device(options: Namespace) -> Device:
    from lightning_ptdp.planner import MACHINE_FILE, find_device, load_calibration

    name = options.device or (str(MACHINE_FILE) if MACHINE_FILE.is_file() else "h100")
    if name.endswith(".json"):
        calibration = load_calibration(Path(name))
        device = calibration.device
        if warning := calibration.doubt():
            print(f"ptdp: {name} {warning}", file=sys.stderr)
    else:
        device = find_device(name)
    if options.memory is not None:
        if not 0 < options.memory < math.inf:
            raise UserError(
                f"--memory {options.memory:g} is not a valid amount of memory. Give a device's "
                "memory in GiB, such as 80"
            )
        device = dataclasses.replace(
            device, memory_bytes=options.memory * 2**30, reserved_bytes=0.0
        )
    cluster_options = {
        name: getattr(options, name)
        for name in ("node_size", "cards")
        if getattr(options, name) is not None
    }
    cluster = dataclasses.replace(device.cluster, **cluster_options)
    return dataclasses.replace(device, cluster=cluster)


def _inner(config: Config, key: str) -> Config:
    """Return the ``init_args`` of ``config[key]``, or an empty mapping."""
    part = config.get(key)
    arguments = part.get("init_args") if isinstance(part, Mapping) else None
    return arguments if isinstance(arguments, Mapping) else {}
