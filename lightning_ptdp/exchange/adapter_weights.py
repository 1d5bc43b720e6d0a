"""Export of adapters as a peft folder or merged, and the reader of such folders."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_ptdp.base.requirements import import_optional
from lightning_ptdp.base.untrusted import hub_blobs, read_json, regular_size
from lightning_ptdp.checkpoint import CheckpointError, TensorReader, files, read_state
from lightning_ptdp.checkpoint.remote_path import PathLike
from lightning_ptdp.checkpoint.tensor_files import open_safetensors
from lightning_ptdp.exchange.state_dict_files import write_converted
from lightning_ptdp.exchange.tokenizers import tokenizer_files
from lightning_ptdp.models.adapters import ALL_LINEAR, LoraOptions, as_lora
from lightning_ptdp.models.pretrained_folder import (
    BASE_WEIGHTS,
    fingerprint,
    local_folder,
    without_prefix,
)

ADAPTER_FILE = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_OURS = "model/model."
_THEIRS = "base_model.model."
_AUTO_CLASSES = {"CAUSAL_LM": "AutoModelForCausalLM", None: "AutoModelForMaskedLM"}
_WITH_IMAGES = "AutoModelForImageTextToText"


def base_of_adapters(state: Mapping[str, Any]) -> str | None:
    """Return the path of the base weights that a checkpoint's adapters were trained with.

    None means that the checkpoint holds a whole model.
    """
    return state[BASE_WEIGHTS]["path"] if BASE_WEIGHTS in state else None


def to_adapters(
    source: PathLike,
    destination: PathLike,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a peft folder from a checkpoint of a ``LitCausalLM`` with adapters.

    ``PeftModel.from_pretrained(base, destination)`` reads the folder.

    Args:
        source: The checkpoint folder.
        destination: The folder to create. An earlier export there is replaced.
        dtype: Dtype of the written floating-point tensors; default: as stored.

    Raises:
        CheckpointError: The checkpoint is damaged. Nothing is left at ``destination``.
    """
    state = read_state(source)
    reader = TensorReader(source)
    target = files.local_path(destination)
    base = state[BASE_WEIGHTS]
    adapter = as_lora(state["hyper_parameters"]["adapter"])
    assert adapter is not None
    config = adapter.config(
        base_model_name_or_path=without_prefix(base["path"]),
        task_type=base["task"],
        inference_mode=True,
    )
    names = {_peft_name(name): name for name in reader.tensors if name.startswith(_OURS)}
    if base.get("auto_class") == _WITH_IMAGES and adapter.target_modules == ALL_LINEAR:
        # For peft, these include the linear layers of the vision tower.
        adapted = {name.removeprefix(_THEIRS).partition(".lora_")[0] for name in names}
        config.target_modules = sorted(adapted)
    files.check_replaceable(target, marker=files.EXPORT_MARK)
    with files.replacing(target) as part:
        part.mkdir()
        (part / files.EXPORT_MARK).touch()
        config.save_pretrained(str(part))
        write_converted(
            part / ADAPTER_WEIGHTS,
            reader,
            dict(sorted(names.items())),
            dtype,
            metadata={"format": "pt"},
        )


def merge_adapters(
    source: PathLike,
    destination: PathLike,
    *,
    base: PathLike | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int,
) -> None:
    """Write a Hugging Face folder of the model, with the adapters merged into the base weights.

    The process holds the whole model in memory.

    Args:
        source: The checkpoint folder of a ``LitCausalLM`` with adapters.
        destination: The folder to create. An earlier export there is replaced.
        base: Current folder of the base weights; default: the folder that training used.
        dtype: Dtype of the model; default: that of its folder.
        shard_bytes: Maximum number of bytes in one file.

    Raises:
        CheckpointError: The checkpoint is damaged, or ``base`` has different weights. Nothing is
            left at ``destination``.
    """
    peft = import_optional("peft")
    transformers = import_optional("transformers")

    base_weights = read_state(source)[BASE_WEIGHTS]
    target = files.local_path(destination)
    folder = local_folder(str(base or base_weights["path"]))
    if fingerprint(folder) != base_weights["fingerprint"]:
        raise CheckpointError(
            f"{folder} does not have the weights with which the adapters of {source} were trained"
        )
    files.check_apart(target, [folder])
    files.check_replaceable(target, marker=files.EXPORT_MARK)
    auto_class = base_weights.get("auto_class") or _AUTO_CLASSES[base_weights["task"]]
    model = getattr(transformers, auto_class).from_pretrained(
        folder, dtype=dtype or "auto", use_safetensors=True, trust_remote_code=False
    )
    with tempfile.TemporaryDirectory() as scratch:
        to_adapters(source, Path(scratch) / "adapter")
        model = peft.PeftModel.from_pretrained(
            model, str(Path(scratch) / "adapter")
        ).merge_and_unload()
    with files.replacing(target) as part:
        model.save_pretrained(part, max_shard_size=shard_bytes)
        (part / files.EXPORT_MARK).touch()
        for name, content in tokenizer_files(folder).items():
            (part / name).write_bytes(content)


def _peft_name(name: str) -> str:
    """Return peft's name for a tensor of a checkpoint.

    Example: ``model/model.h.q_proj.lora_A.default.weight`` ->
    ``base_model.model.h.q_proj.lora_A.weight``.
    """
    name = _THEIRS + re.sub(r"\.modules_to_save\.[^.]+", "", name.removeprefix(_OURS))
    name = name.replace("lora_magnitude_vector.default.weight", "lora_magnitude_vector.default")
    return re.sub(r"(\.lora_\w+)\.default(?=\.|$)", r"\1", name)


# ---- Reader of peft's adapter folders, for text generation ---------------------------------------


_OPTIONS = {"r": "r", "lora_alpha": "alpha", "use_rslora": "use_rslora", "use_dora": "use_dora"}
_UNSUPPORTED = (
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "lora_bias",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
)
_KEEPING_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that do not change the base model (as PiSSA and OLoRA do)."""
_OF_ADAPTER = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(?=\.|$)")


def is_adapter_folder(path: Path) -> bool:
    """Return True for a folder of adapters that peft's ``save_pretrained`` wrote."""
    return (path / ADAPTER_FILE).is_file() and not (path / "config.json").exists()


def read_adapter_folder(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the arguments of a ``LitCausalLM`` with these adapters, and their tensors.

    The tensors are keyed by their names in that module.

    Raises:
        CheckpointError: The folder is damaged, names no base model, or holds adapters other than
            LoRA's.
    """
    linked = hub_blobs(path)
    file = path / ADAPTER_FILE
    try:
        regular_size(path / ADAPTER_WEIGHTS, linked=linked)
        config = read_json(file, linked=linked)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as adapters: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} must be a JSON object")
    base_model = config.get("base_model_name_or_path")
    if not isinstance(base_model, str) or not base_model:
        raise CheckpointError(f"{file} names no base model (base_model_name_or_path)")
    unsupported = [f"{name} is not supported" for name in _UNSUPPORTED if config.get(name)]
    init = config.get("init_lora_weights")
    if init not in _KEEPING_BASE:
        unsupported.append(f"init_lora_weights={init!r} has changed the base model")
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        unsupported.insert(
            0,
            f"peft_type={config.get('peft_type')!r} with bias={config.get('bias')!r} is not "
            "supported, only LoRA without biases",
        )
    if unsupported:
        raise CheckpointError(
            f"{file}: {unsupported[0]}. Merge these adapters with peft (merge_and_unload), and "
            "use the merged model"
        )
    targets = config.get("target_modules")
    options = {name: config[key] for key, name in _OPTIONS.items() if key in config}
    try:
        adapter = LoraOptions(
            target_modules=targets if isinstance(targets, str) else tuple(targets or ()),
            modules_to_save=tuple(config.get("modules_to_save") or ()),
            **options,
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    tensors = {
        _module_name(name, adapter): value.clone()
        for name, value in open_safetensors(path / ADAPTER_WEIGHTS).items()
    }
    return {"path": base_model, "adapter": adapter}, tensors


def _module_name(name: str, adapter: LoraOptions) -> str:
    """Return the name that a stored adapter tensor has in a ``LitCausalLM``.

    Example: ``base_model.model.h.q_proj.lora_A.weight`` ->
    ``model.h.q_proj.lora_A.default.weight``.
    """
    short = "model." + name.removeprefix(_THEIRS)
    if _OF_ADAPTER.search(short):
        return _OF_ADAPTER.sub(r"\g<0>.default", short)
    owner, _, leaf = short.rpartition(".")
    if any(owner.endswith(module) for module in adapter.modules_to_save):
        return f"{owner}.modules_to_save.default.{leaf}"
    return short
