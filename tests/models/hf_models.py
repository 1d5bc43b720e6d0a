"""Hugging Face models with the sizes of ours."""

import pytest
import torch
from torch import nn

from tests.models.configs import GPT2, LLAMA

transformers = pytest.importorskip("transformers")


def randomized(model: nn.Module) -> nn.Module:
    """Randomize all weights: initial zero biases and unit norms would hide errors."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1)
            )
    return model.eval()


def hf_gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=GPT2.vocabulary_size,
        n_positions=GPT2.sequence_length,
        n_embd=GPT2.hidden_size,
        n_layer=GPT2.num_layers,
        n_head=GPT2.num_heads,
    )
    return randomized(transformers.GPT2LMHeadModel(config))


def hf_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=LLAMA.vocabulary_size,
        hidden_size=LLAMA.hidden_size,
        intermediate_size=LLAMA.ffn_size,
        num_hidden_layers=LLAMA.num_layers,
        num_attention_heads=LLAMA.num_heads,
        num_key_value_heads=LLAMA.num_kv_heads,
        max_position_embeddings=LLAMA.sequence_length,
        rms_norm_eps=LLAMA.norm_eps,
    )
    return randomized(transformers.LlamaForCausalLM(config))
