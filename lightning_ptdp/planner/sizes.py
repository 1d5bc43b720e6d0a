"""The sizes of a model that is not ours: what a Hugging Face configuration says, as those of a GPT that keeps and computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_ptdp.models.config import GPTConfig, TransformerConfig

__all__ = ["gpt_sizes"]

_NAMES = {
    "vocabulary_size": ("vocab_size",),
    "sequence_length": ("max_position_embeddings", "n_positions"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "num_kv_heads": ("num_key_value_heads",),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
}
_NEEDED = ("vocabulary_size", "sequence_length", "num_layers", "hidden_size", "num_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_GATED = ("silu", "swish")


def gpt_sizes(config: object) -> GPTConfig:
    """A GPT of the sizes of ``config``: ours, or a Hugging Face configuration, as an object or as what its ``config.json`` holds.

    Gated feed-forward parts and RMSNorm are taken for granted where the configuration has key/value heads of its own, as Llama's kin does.

    Raises:
        ValueError: A size is missing, or there is something that no GPT of ours has; the message names it.
    """
    if isinstance(config, GPTConfig):
        return config
    if isinstance(config, TransformerConfig):
        # A BERT keeps and computes what a GPT of its sizes does, but for the attention's mask and the small parts around its head.
        return GPTConfig(**{name: getattr(config, name) for name in TransformerConfig.__dataclass_fields__})
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else vars(config)
    for name in _EXPERTS:
        if (values.get(name) or 1) > 1:
            raise ValueError(f"{name}={values[name]!r}: mixtures of experts are not planned yet; give the sizes of a dense model")
    found = {field: next((values[name] for name in names if values.get(name)), None) for field, names in _NAMES.items()}
    if missing := [_NAMES[field][0] for field in _NEEDED if found[field] is None]:
        raise ValueError(f"its configuration has no {', '.join(missing)}: give the sizes as options, such as --layers 24")
    given = {field: value for field, value in found.items() if value is not None}
    width = given["hidden_size"] // given["num_heads"]
    if values.get("head_dim") not in (None, width):
        raise ValueError(
            f"head_dim={values['head_dim']!r} is not hidden_size / num_attention_heads = {width}: give sizes that are near"
        )
    tied = bool(values.get("tie_word_embeddings", True))
    if found["num_kv_heads"] is not None:
        return GPTConfig.llama(**given, tie_embeddings=tied)
    return GPTConfig.gpt2(**given, tie_embeddings=tied, mlp="swiglu" if values.get("hidden_act") in _GATED else "gelu")
