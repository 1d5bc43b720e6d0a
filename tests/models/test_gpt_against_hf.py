"""Hugging Face's GPT-2 and Llama with the same weights give the same logits and gradients."""

import pytest
import torch

from lightning_ptdp.models import GPT
from tests.models.configs import GPT2, LLAMA
from tests.models.hf_models import hf_gpt2, hf_llama


def weights_from_gpt2(source):
    names = {
        "ln_1": "norm_1",
        "ln_2": "norm_2",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.projection",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    }
    state = {f"{ours}.weight": source[f"transformer.{ours}.weight"] for ours in ("wte", "wpe")}
    state |= {f"norm.{kind}": source[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")}
    for index in range(GPT2.num_layers):
        for theirs, ours in names.items():
            for kind in ("weight", "bias"):
                value = source[f"transformer.h.{index}.{theirs}.{kind}"]
                # Conv1D stores (in, out)
                state[f"blocks.{index}.{ours}.{kind}"] = value.T if value.dim() == 2 else value
    return state | {"head.weight": state["wte.weight"]}


def weights_from_llama(source):
    state = {
        "wte.weight": source["model.embed_tokens.weight"],
        "norm.weight": source["model.norm.weight"],
        "head.weight": source["lm_head.weight"],
    }
    parts = {
        "norm_1": ["input_layernorm"],
        "norm_2": ["post_attention_layernorm"],
        "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention.projection": ["self_attn.o_proj"],
        "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down": ["mlp.down_proj"],
    }
    for index in range(LLAMA.num_layers):
        for ours, theirs in parts.items():
            values = [source[f"model.layers.{index}.{name}.weight"] for name in theirs]
            state[f"blocks.{index}.{ours}.weight"] = torch.cat(values)
    return state


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logits_and_gradients_equal_hugging_face(name):
    theirs = hf_gpt2() if name == "gpt2" else hf_llama()
    convert = weights_from_gpt2 if name == "gpt2" else weights_from_llama
    ours = GPT(GPT2 if name == "gpt2" else LLAMA)
    ours.load_state_dict(convert(theirs.state_dict()))
    ids = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))
    logits, expected = ours(ids), theirs(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for value in (logits, expected):
        value.logsumexp(-1).mean().backward()
    gradients = convert(
        {key: p.grad for key, p in theirs.named_parameters()}
        | {"lm_head.weight": theirs.lm_head.weight.grad}
    )
    for key, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            gradients[key],
            rtol=1e-4,
            atol=1e-6,
            msg=lambda m, key=key: f"{key}: {m}",
        )
