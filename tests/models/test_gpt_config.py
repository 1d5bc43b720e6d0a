"""GPT configurations: defaults, GPT-2 and Llama variants, and errors that name field and fix."""

import pytest

from lightning_ptdp.models import GPTConfig
from lightning_ptdp.models.model_config import check_tensor_parallel
from tests.errors import raises_with

GATED = {"mlp": "swiglu", "bias": False}


def test_gpt2_and_llama_defaults():
    for config, expected in (
        (GPTConfig.gpt2(), ("layer", "learned", "gelu", True, True)),
        (GPTConfig.llama(), ("rms", "rope", "swiglu", False, False)),
    ):
        assert (
            config.norm,
            config.position,
            config.mlp,
            config.bias,
            config.tie_embeddings,
        ) == expected
    assert GPTConfig.llama(tie_embeddings=True, num_layers=3).tie_embeddings


@pytest.mark.parametrize(
    ("hidden_size", "expected"),
    # the first three: Llama 7B, 13B, 65B
    [
        (4096, 11008),
        (5120, 13824),
        (8192, 22016),
        (256, 704),
        (64, 192),
    ],
)
def test_swiglu_width_follows_llama_rule(hidden_size, expected):
    assert GPTConfig.llama(hidden_size=hidden_size, num_heads=8).ffn_size == expected


def test_missing_sizes_are_derived():
    config = GPTConfig(hidden_size=96, num_heads=6)
    assert (config.head_dim, config.kv_heads, config.ffn_size) == (16, 6, 384)
    config = GPTConfig(hidden_size=96, num_heads=6, num_kv_heads=2, ffn_hidden_size=100)
    assert (config.kv_heads, config.ffn_size) == (2, 100)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 0}, ["num_layers=0", "positive integer"]),
        ({"hidden_size": 64.0}, ["hidden_size=64.0", "positive integer"]),
        ({"num_kv_heads": True}, ["num_kv_heads=True", "positive integer"]),
        ({"hidden_size": 100, "num_heads": 12}, ["hidden_size=100", "num_heads=12", "10"]),
        ({"num_heads": 12, "num_kv_heads": 5}, ["num_heads=12", "num_kv_heads=5", "4, 6"]),
        (
            {"hidden_size": 30, "num_heads": 6, "position": "rope"},
            ["'rope'", "30 / 6 = 5", "learned"],
        ),
        ({"norm": "batch"}, ["norm='batch'", "layer", "rms"]),
        ({"mlp": "relu"}, ["mlp='relu'", "gelu", "swiglu"]),
        ({"dropout": 1.0}, ["dropout=1.0", "less than 1"]),
        (
            {"num_experts": 4, "experts_per_token": 5, **GATED},
            ["experts_per_token=5", "num_experts=4", "at most 4"],
        ),
        (
            {"num_experts": 4, "dense_layers": 12, **GATED},
            ["dense_layers=12", "num_layers=12", "at most 11"],
        ),
        (
            {"num_experts": 4},
            ["num_experts=4", "mlp='gelu'", "bias=True", "mlp='swiglu' and bias=False"],
        ),
        ({"shared_experts": 1}, ["shared_experts=1", "Set num_experts"]),
        (
            {"num_experts": 4, "balance": "bias", "balance_coefficient": 0.1},
            ["balance_coefficient=0.1", "balance='loss'"],
        ),
        (
            {"num_experts": 4, "balance": "bias", "bias_rate": 0.0},
            ["bias_rate=0.0", "from 1e-9 to 1", "balance='none'"],
        ),
        ({"num_experts": 4, "capacity_factor": 0.0}, ["capacity_factor=0.0", "greater than 0"]),
        ({"num_experts": 4, "z_loss_coefficient": -1.0}, ["z_loss_coefficient=-1.0", "at least 0"]),
        ({"init_std": 0.0}, ["init_std=0.0", "greater than 0"]),
    ],
)
def test_invalid_config_is_refused(changes, words):
    with raises_with(words):
        GPTConfig(**changes)


def test_indivisible_tensor_parallel_size_is_refused():
    config = GPTConfig.llama(hidden_size=96, num_heads=12, num_kv_heads=4, ffn_hidden_size=256)
    for degree in (1, 2, 4):
        check_tensor_parallel(config, degree)
    with pytest.raises(ValueError, match=r"num_heads=12 .*tensor_parallel_size=8.* of 1, 2, 4$"):
        check_tensor_parallel(config, 8)
    with pytest.raises(ValueError, match=r"num_kv_heads=4 .*tensor_parallel_size=3.* of 1, 2, 4$"):
        check_tensor_parallel(config, 3)
    with pytest.raises(ValueError, match=r"ffn_hidden_size=90 .*tensor_parallel_size=4.* of 1, 2$"):
        check_tensor_parallel(
            GPTConfig(hidden_size=96, num_heads=12, num_kv_heads=4, ffn_hidden_size=90), 4
        )
