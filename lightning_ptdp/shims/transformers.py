"""Names of transformers that it does not promise to keep, in one place
(tests/huggingface/test_collected.py)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.base.function_replacement import Replacing

__all__ = [
    "advance_cache",
    "as_in_files",
    "captured_outputs",
    "collects_by_itself",
    "has_sdpa",
    "ignored_names",
    "install_capture",
    "is_capture",
    "is_causal_model",
    "is_huggingface_model",
    "new_cache",
]

_CAPTURING = "transformers.utils.output_capturing"
_INSTALLED = "_output_capturing_hooks_installed"
_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


def captured_outputs() -> dict[str, list[object]]:
    """Return the outputs that the running forward of a Hugging Face model has captured of its
    layers so far, by kind
    ("hidden_states"): lists that hooks on the layers go on filling. Empty if nothing is captured.
    """
    capturing = sys.modules.get(_CAPTURING)
    active = None if capturing is None else capturing._active_collector.get()
    return {key: value for key, value in (active or {}).items() if isinstance(value, list)}


def install_capture(model: nn.Module) -> None:
    """Put the hooks that capture on the layers that are now in ``model``, instead of at the first
    forward that captures."""
    capturing = sys.modules.get(_CAPTURING)
    if capturing is not None:
        for module in model.modules():
            # Where a model inside has them already, those around it would put them there once more.
            if hasattr(module, "_can_record_outputs") and not any(
                _INSTALLED in vars(child) for child in module.modules()
            ):
                capturing.maybe_install_capturing_hooks(module)


def is_capture(hook: object) -> bool:
    """Return True if a forward hook captures outputs."""
    return getattr(hook, "__module__", None) == _CAPTURING


def is_huggingface_model(module: nn.Module) -> bool:
    """Return True if a module is a model of transformers."""
    return callable(getattr(type(module), "can_generate", None))


def collects_by_itself(module: nn.Module) -> bool:
    """Return True if a model's own loop collects what its configuration asks for: no hooks on the
    layers capture it."""
    model: Any = module
    if not is_huggingface_model(model) or getattr(model.base_model, "_can_record_outputs", None):
        return False
    return any(
        getattr(model.config, f"output_{name}", False)
        for name in ("hidden_states", "attentions", "router_logits")
    )


def is_causal_model(module: nn.Module) -> bool:
    """Return True for a model that predicts the token after each token, and has no encoder."""
    model: Any = module
    return (
        is_huggingface_model(model) and model.can_generate() and not model.config.is_encoder_decoder
    )


def new_cache(config: Any) -> Any:
    """An empty cache of keys and values for a model of ``config``; None where the model keeps
    something else, or its layers share them."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=config)
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return (
        cache
        if plain and len(cache.layers) == config.get_text_config(decoder=True).num_hidden_layers
        else None
    )


def advance_cache(cache: Any, length: int, device: torch.device) -> None:
    """Let the layers that were not called, since they are on other stages, have seen ``length``
    tokens too: a model asks any of them."""
    for layer in cache.layers:
        missing = length - layer.get_seq_length()
        if missing > 0:
            nothing = torch.zeros(1, 1, missing, 1, device=device)
            layer.update(nothing, nothing)


def has_sdpa(kind: type[nn.Module]) -> bool:
    """Return True if a class of models can compute attention by
    ``scaled_dot_product_attention``."""
    return bool(getattr(kind, "_supports_sdpa", False))


def ignored_names(model: nn.Module) -> tuple[str, ...]:
    """Return regular expressions for the names of stored tensors that a Hugging Face model leaves
    out: buffers that were saved once, and are computed now."""
    own = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return (*sorted(own), *_COMPUTED)


def as_in_files(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state as ``save_pretrained`` writes it: other names, and tensors cut apart, as views
    where it would copy."""
    from transformers.core_model_loading import revert_weight_conversion

    with Replacing({Tensor.contiguous: lambda value, **_: value}):
        return dict(revert_weight_conversion(model, dict(state)))
