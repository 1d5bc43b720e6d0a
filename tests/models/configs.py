"""Small model configurations shared by the tests of this folder."""

from typing import Any

from lightning_ptdp.models import GPTConfig

SIZES: dict[str, Any] = {
    "vocabulary_size": 61,
    "sequence_length": 24,
    "num_layers": 3,
    "hidden_size": 32,
    "num_heads": 4,
}
_SMALLER: dict[str, Any] = {
    "vocabulary_size": 50,
    "sequence_length": 16,
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
}
GPT2 = GPTConfig.gpt2(**SIZES, init_std=0.2)
LLAMA = GPTConfig.llama(**SIZES, num_kv_heads=2, init_std=0.2)
VARIANTS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "gpt2, own head, no bias": GPTConfig.gpt2(
        **{**_SMALLER, "hidden_size": 24, "num_heads": 3}, bias=False, tie_embeddings=False
    ),
    "llama, tied, biases, one kv head": GPTConfig.llama(
        **{**_SMALLER, "hidden_size": 32, "num_heads": 4},
        num_kv_heads=1,
        ffn_hidden_size=40,
        bias=True,
        tie_embeddings=True,
    ),
    "experts": GPTConfig.llama(
        **_SMALLER,
        ffn_hidden_size=24,
        num_experts=2,
        experts_per_token=2,
        expert_hidden_size=12,
        shared_experts=2,
        dense_layers=1,
        router_score="sigmoid",
    ),
    "mixtral": GPTConfig.llama(
        **_SMALLER, expert_hidden_size=12, num_experts=4, capacity_factor=1.0
    ),
    "layer norm, rope, gelu": GPTConfig(
        **{**_SMALLER, "num_layers": 1}, position="rope", ffn_hidden_size=24
    ),
}
MIXTRAL = GPTConfig.llama(
    vocabulary_size=32000,
    sequence_length=4096,
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    ffn_hidden_size=14336,
    num_experts=8,
)
"""Mixtral 8x7B."""
