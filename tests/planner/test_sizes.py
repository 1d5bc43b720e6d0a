"""Tests that the planner reads model sizes from Hugging Face configurations.

Parameter counts must match the model that the configuration builds.
"""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

from lightning_ptdp.planner import gpt_sizes
from tests.planner.jobs import small_job

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
GROUPS = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FEW = {"num_experts": 8, "num_experts_per_tok": 2}
CONFIGS = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "olmoe": OlmoeConfig(**SIZES, **FEW),
    "qwen3": Qwen3MoeConfig(
        **SIZES, **FEW, head_dim=32, moe_intermediate_size=20, mlp_only_layers=[0]
    ),
    "deepseek": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, **LATENT, **GROUPS, moe_intermediate_size=20
    ),
    "deepseek, whole queries": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4, **LATENT, "q_lora_rank": None},
        **GROUPS,
        moe_intermediate_size=20,
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_parameters_match_hugging_face_model(config):
    shape = small_job(gpt_sizes(config)).shape
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    norms = sum(
        p.numel()
        for name, p in model.named_parameters()
        if name.endswith(("q_norm.weight", "k_norm.weight"))
    )
    assert shape.parameters == sum(p.numel() for p in model.parameters()) - norms
    experts = {name: p.numel() for name, p in model.named_parameters() if ".experts." in name}
    layers = len({name.partition(".mlp.")[0] for name in experts})
    assert sum(count for count, layer in shape.runs if layer.experts is not None) == layers
    one = next(layer.experts for _, layer in shape.runs if layer.experts is not None)
    assert sum(experts.values()) == layers * one.number * one.parameters


def test_deepseek_v3_parameter_counts():
    """arXiv 2412.19437, section 4.2: 671B parameters, of which 37B are activated for each token."""
    shape = small_job(gpt_sizes(DeepseekV3Config(num_key_value_heads=128))).shape
    assert (round(shape.parameters / 1e9), round(shape.active_parameters / 1e9)) == (671, 38)
    # without the embedding
    assert (shape.active_parameters - 129280 * 7168) / 1e9 == pytest.approx(36.6, abs=0.1)


def test_incomplete_latent_attention_is_refused():
    latent = {**SIZES, "kv_lora_rank": 16}
    with pytest.raises(
        ValueError,
        match="has kv_lora_rank=16, but no qk_nope_head_dim, qk_rope_head_dim, v_head_dim",
    ):
        gpt_sizes(latent)
