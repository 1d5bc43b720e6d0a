"""Reader of peft's adapter folders, for text generation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_ptdp.base.untrusted import hub_blobs, read_json, regular_size
from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.checkpoint.safetensors_file import open_safetensors
from lightning_ptdp.exchange.adapter_weights import ADAPTER_FILE, ADAPTER_WEIGHTS
from lightning_ptdp.models.adapters import LoraOptions

__all__ = ["is_adapter_folder", "read_adapter_folder"]

_OPTIONS = {"r": "r", "lora_alpha": "alpha", "use_rslora": "use_rslora", "use_dora": "use_dora"}
_UNSUPPORTED = (
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
)
_PREFIX = "base_model.model."
_WRAPPED = (
    ".lora_A.",
    ".lora_B.",
    ".lora_embedding_A",
    ".lora_embedding_B",
    ".lora_magnitude_vector",
)


def is_adapter_folder(path: Path) -> bool:
    """Return True for a folder of adapters that peft's ``save_pretrained`` wrote."""
    return (path / ADAPTER_FILE).is_file() and not (path / "config.json").exists()


def read_adapter_folder(
    path: Path, *, base: str | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the arguments of a ``LitCausalLM`` with these adapters, and their tensors.

    The tensors are keyed by their names in that module.

    Args:
        path: The folder.
        base: Folder or hub name of the base model; None: the one that ``adapter_config.json``
            names.

    Raises:
        CheckpointError: The folder is damaged, names no base model, or holds adapters other than
            LoRA's.
    """
    linked = hub_blobs(path)
    try:
        regular_size(path / ADAPTER_WEIGHTS, linked=linked)
        given = read_json(path / ADAPTER_FILE, linked=linked)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as adapters: {error}") from error
    if not isinstance(given, dict):
        raise CheckpointError(f"{path / ADAPTER_FILE} must be a JSON object")
    found = base if base is not None else given.get("base_model_name_or_path")
    if not isinstance(found, str) or not found:
        raise CheckpointError(
            f"{path / ADAPTER_FILE} names no base model (base_model_name_or_path)"
        )
    if given.get("peft_type") != "LORA" or given.get("bias", "none") != "none":
        raise CheckpointError(
            f"{path / ADAPTER_FILE}: peft_type={given.get('peft_type')!r} with "
            f"bias={given.get('bias')!r} is not supported, only LoRA without biases. Merge "
            "these adapters with peft (merge_and_unload), and use the merged model"
        )
    for name in _UNSUPPORTED:
        if given.get(name):
            raise CheckpointError(
                f"{path / ADAPTER_FILE}: {name} is not supported. Merge these adapters with "
                "peft (merge_and_unload), and use the merged model"
            )
    adapter = _options(path, given)
    tensors = {
        _module_name(name, adapter): value.clone()
        for name, value in open_safetensors(path / ADAPTER_WEIGHTS).items()
    }
    return {"path": found, "adapter": adapter}, tensors


def _options(path: Path, given: Mapping[str, Any]) -> LoraOptions:
    targets, whole = given.get("target_modules"), given.get("modules_to_save") or ()
    options = {ours: given[theirs] for theirs, ours in _OPTIONS.items() if theirs in given}
    try:
        return LoraOptions(
            target_modules=targets if isinstance(targets, str) else tuple(targets or ()),
            modules_to_save=tuple(whole),
            **options,
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path / ADAPTER_FILE}: {error}") from error


def _module_name(name: str, adapter: LoraOptions) -> str:
    """Return the name that a stored adapter tensor has in a ``LitCausalLM``.

    Example: ``base_model.model.h.q_proj.lora_A.weight`` ->
    ``model.h.q_proj.lora_A.default.weight``.
    """
    short = "model." + name.removeprefix(_PREFIX)
    for part in _WRAPPED:
        head, found, tail = short.partition(part)
        if found:
            return f"{head}{part.rstrip('.')}.default" + (f".{tail}" if tail else "")
    owner, _, leaf = short.rpartition(".")
    return (
        f"{owner}.modules_to_save.default.{leaf}"
        if any(owner.endswith(one) for one in adapter.modules_to_save)
        else short
    )
