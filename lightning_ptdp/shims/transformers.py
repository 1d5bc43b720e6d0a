"""Names of transformers that are not part of its stable API.

tests/huggingface/test_collected.py checks them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.base.torch_calls import Replacing

_CAPTURING = "transformers.utils.output_capturing"
_INSTALLED = "_output_capturing_hooks_installed"
_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
_OLDER = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
)
"""Patterns of the files that ``save_pretrained`` of a tokenizer writes."""


def captured_outputs() -> dict[str, list[object]]:
    """Return the outputs that a running Hugging Face forward has captured of its layers.

    They are listed by kind ("hidden_states"). Hooks on the layers continue to fill the lists. The
    result is empty if nothing is captured.
    """
    capturing = sys.modules.get(_CAPTURING)
    active = None if capturing is None else capturing._active_collector.get()
    return {key: value for key, value in (active or {}).items() if isinstance(value, list)}


def install_capture(model: nn.Module) -> None:
    """Install the capturing hooks on the layers that are now in ``model``.

    By default they are installed at the first forward that captures.
    """
    capturing = sys.modules.get(_CAPTURING)
    if capturing is not None:
        for module in model.modules():
            # If an inner model has hooks already, an outer model would install them again.
            if hasattr(module, "_can_record_outputs") and not any(
                _INSTALLED in vars(child) for child in module.modules()
            ):
                capturing.maybe_install_capturing_hooks(module)


def is_capture(hook: object) -> bool:
    """Return True if a forward hook captures outputs."""
    return getattr(hook, "__module__", None) == _CAPTURING


def is_gradient_request(hook: object) -> bool:
    """Return True if a forward hook makes the output of the embedding require a gradient.

    transformers (``gradient_checkpointing_enable``), peft and trl add hooks of this name.
    """
    return getattr(hook, "__name__", "").startswith("make_inputs_require_grad")


def is_huggingface_model(module: nn.Module) -> bool:
    """Return True if a module is a model of transformers."""
    return callable(getattr(type(module), "can_generate", None))


def collects_by_itself(module: nn.Module) -> bool:
    """Return True if a model's own loop collects outputs that its configuration requests.

    No hooks on the layers capture them then.
    """
    model: Any = module
    if not is_huggingface_model(model) or getattr(model.base_model, "_can_record_outputs", None):
        return False
    return any(
        getattr(model.config, f"output_{name}", False)
        for name in ("hidden_states", "attentions", "router_logits")
    )


def image_token_of(module: nn.Module) -> int | None:
    """Return the id of the tokens that stand for images in the model inside; None if unknown."""
    return next((model.config.image_token_id for model in _image_models(module)), None)


def image_parts(module: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the modules that compute image features in the model inside.

    These are all parts of a vision-language model but its language model and head.
    """
    for model in _image_models(module):
        embedding = model.get_input_embeddings()
        parts = {part for part in model.base_model.children() if embedding not in part.modules()}
        return tuple(f"{name}." for name, part in module.named_modules() if part in parts)
    return ()


def _image_models(module: nn.Module) -> Iterator[Any]:
    for child in module.modules():
        token = getattr(getattr(child, "config", None), "image_token_id", None)
        if isinstance(token, int) and is_huggingface_model(child):
            yield child


def is_causal_model(module: nn.Module) -> bool:
    """Return True for a model that predicts the token after each token, and has no encoder."""
    model: Any = module
    return (
        is_huggingface_model(model) and model.can_generate() and not model.config.is_encoder_decoder
    )


def new_cache(config: Any) -> Any:
    """Return an empty cache of keys and values for a model of ``config``.

    The result is None if the model caches something else, or if its layers share the cache.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=config)
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    if plain and len(cache.layers) == config.get_text_config(decoder=True).num_hidden_layers:
        return cache
    return None


def advance_cache(cache: Any, length: int, device: torch.device) -> None:
    """Let the layers of other stages count ``length`` tokens as seen.

    These layers were not called, but a model may query the length of any layer.
    """
    for layer in cache.layers:
        missing = length - layer.get_seq_length()
        if missing > 0:
            zeros = torch.zeros(1, 1, missing, 1, device=device)
            layer.update(zeros, zeros)


def has_sdpa(kind: type[nn.Module]) -> bool:
    """Return True if a model class supports ``scaled_dot_product_attention``."""
    return bool(getattr(kind, "_supports_sdpa", False))


def ignored_names(model: nn.Module) -> tuple[str, ...]:
    """Return patterns for the names of stored tensors that a Hugging Face model ignores.

    These are regular expressions for buffers that were saved once, and are computed now.
    """
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return (*sorted(patterns), *_COMPUTED)


def modern_name(stored: str) -> str:
    """Return the name that transformers gives a tensor of a file that an older version wrote."""
    for older, name in _OLDER:
        stored = stored.replace(older, name)
    return stored


def as_in_files(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state as ``save_pretrained`` writes it, with views instead of copies.

    Names differ, and tensors are split.
    """
    from transformers.core_model_loading import revert_weight_conversion

    with Replacing({Tensor.contiguous: lambda value, **_: value}):
        return dict(revert_weight_conversion(model, dict(state)))
