"""The sizes of a Hugging Face configuration as those of an equivalent GPT of ours.

An equivalent GPT keeps and computes the same amount.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ptdp.base.option_types import Size
from lightning_ptdp.models.model_config import BertConfig, GPTConfig

__all__ = ["Latent", "PlannedGPT", "gpt_sizes"]

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
_MIXTURE = {
    "num_experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k"),
    "expert_hidden_size": ("moe_intermediate_size", "intermediate_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "dense_layers": ("first_k_dense_replace",),
}
_GATED = ("silu", "swish")


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Latent attention (arXiv 2405.04434, section 2.1).

    Queries, keys and values are computed from a narrower representation.

    Attributes:
        queries: Channels from which queries are computed; None means the residual stream.
        keys: Channels from which keys and values are computed.
        plain: Channels of a head's query and key without rotary position.
        turned: Channels with rotary position; those of the key are shared by all heads.
        values: Channels of a head's values.
    """

    queries: Size | None
    keys: Size
    plain: Size
    turned: Size
    values: Size


@dataclass(frozen=True, kw_only=True)
class PlannedGPT(GPTConfig):
    """A GPT that is planned, not built.

    Attributes:
        head_size: Channels of a head; None means ``hidden_size / num_heads``.
        latent: Latent attention; None means the attention of a GPT.
    """

    head_size: Size | None = None
    latent: Latent | None = None

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head."""
        return super().head_dim if self.head_size is None else self.head_size

    def _check_heads(self) -> None:
        if self.head_size is None:
            super()._check_heads()


_PERIODS = (
    "decoder_sparse_step",
    "interleave_moe_layer_step",
    "expert_layer_period",
    "moe_layer_freq",
)
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def gpt_sizes(config: object) -> GPTConfig | BertConfig:
    """Return a GPT with the sizes of ``config``; a configuration of ours stays as it is.

    Gated feed-forward parts and RMSNorm are assumed if the configuration has key/value heads, as
    models similar to Llama do.

    Args:
        config: A configuration of ours, a Hugging Face configuration object, or the values of its
            ``config.json``.

    Raises:
        ValueError: A size is missing, or the model has a part that our GPT lacks. The message names
            it.
    """
    if isinstance(config, GPTConfig | BertConfig):
        return config
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else vars(config)
    found = _found(values, _NAMES)
    if missing := [_NAMES[field][0] for field in _NEEDED if found[field] is None]:
        raise ValueError(
            f"its configuration has no {', '.join(missing)}. Give the sizes as options, such "
            "as --layers 24"
        )
    given = {field: value for field, value in found.items() if value is not None}
    kinds = sorted({str(kind) for kind in values.get("layer_types") or ()} - _ATTENTION)
    if kinds := kinds or sorted(name for name in values if name.startswith("mamba_"))[:1]:
        raise ValueError(
            f"its layers are not all attention ({', '.join(kinds)}). Give the sizes of a model "
            "that needs about the same time"
        )
    given |= _mixture(values)
    tied = bool(values.get("tie_word_embeddings", True))
    if found["num_kv_heads"] is not None or "num_experts" in given:
        head, latent = values.get("head_dim"), _latent(values)
        return PlannedGPT.llama(**given, tie_embeddings=tied, head_size=head, latent=latent)
    return GPTConfig.gpt2(
        **given, tie_embeddings=tied, mlp="swiglu" if values.get("hidden_act") in _GATED else "gelu"
    )


def _found(values: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    return {
        field: next((values[name] for name in every if values.get(name)), None)
        for field, every in names.items()
    }


def _latent(values: Mapping[str, Any]) -> Latent | None:
    if not values.get("kv_lora_rank"):
        return None
    names = {
        "keys": "kv_lora_rank",
        "plain": "qk_nope_head_dim",
        "turned": "qk_rope_head_dim",
        "values": "v_head_dim",
    }
    if missing := [name for name in names.values() if not values.get(name)]:
        raise ValueError(
            f"its configuration has kv_lora_rank={values['kv_lora_rank']!r}, but no "
            f"{', '.join(missing)}"
        )
    return Latent(
        queries=values.get("q_lora_rank"), **{field: values[name] for field, name in names.items()}
    )


def _mixture(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a GPT with experts; none if it has at most one expert."""
    found = {name: value for name, value in _found(values, _MIXTURE).items() if value is not None}
    if found.get("num_experts", 1) == 1:
        return {}
    if "experts_per_token" not in found:
        raise ValueError(
            f"num_experts={found['num_experts']!r}, but the number of active experts per token "
            "is unknown (num_experts_per_tok)"
        )
    for name in _PERIODS:
        if (every := values.get(name) or 1) != 1:
            raise ValueError(
                f"{name}={every!r} is not supported: layers without experts must come first"
            )
    if shared := values.get("shared_expert_intermediate_size"):
        found["shared_experts"] = max(1, round(shared / found["expert_hidden_size"]))
    if dense := values.get("mlp_only_layers"):
        if sorted(dense) != list(range(len(dense))):
            raise ValueError(
                f"mlp_only_layers={dense!r} is not supported: layers without experts must come "
                "first"
            )
        found["dense_layers"] = len(dense)
    return found
