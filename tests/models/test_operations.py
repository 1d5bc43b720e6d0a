"""FLOPs of a mixture of experts: by formula, by torch's counter and counted without data."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_ptdp.models import GPT, GPTConfig, LitCausalLM, flops_per_sample
from lightning_ptdp.models.adapters import LoraOptions
from lightning_ptdp.models.size import Operations, count_operations

H, F, L, V, HEADS, KV = 32, 48, 3, 50, 4, 2
GPT_MOE = GPTConfig(
    vocabulary_size=V,
    sequence_length=24,
    num_layers=L,
    hidden_size=H,
    num_heads=HEADS,
    mlp="swiglu",
    bias=False,
    num_experts=8,
    experts_per_token=2,
    shared_experts=1,
    expert_hidden_size=F,
    dense_layers=1,
)
MIXTRAL = {"intermediate_size": F, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN = {
    "intermediate_size": 64,
    "moe_intermediate_size": F,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": F,
}


def test_flops_of_gpt_experts_equal_torch_counter():
    ids = torch.randint(V, (1, 24), generator=torch.Generator().manual_seed(1))
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            # In double precision the experts are multiplied one by one. torch's counter does not
            # support the grouped product.
            GPT(GPT_MOE).double()(ids).sum().backward()
        found = count_operations(
            lambda: GPT(GPT_MOE),
            lambda model, length: model(torch.zeros(1, length, dtype=torch.long)),
            longest=24,
        )
    # weighting of the experts' outputs, a product in the forward pass
    weighing = GPT_MOE.layers_with_experts * 2 * 24 * GPT_MOE.experts_per_token * H
    assert flops_per_sample(GPT_MOE) == counter.get_total_flops() - weighing == found.of(24)
    assert flops_per_sample(GPT_MOE, sequence_length=8) == found.of(8)


@pytest.mark.parametrize(("name", "options"), [("Mixtral", MIXTRAL), ("Qwen2Moe", QWEN)])
def test_flops_of_hugging_face_mixture_match_formula(name, options, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": H,
        "num_hidden_layers": L,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "vocab_size": V,
    }
    getattr(transformers, f"{name}Config")(**sizes, **options).save_pretrained(tmp_path)
    attention = 2 * H * H + 2 * H * H * KV // HEADS
    shared = 0 if name == "Mixtral" else 3 * H * F + H
    visited = L * (attention + 8 * H + 2 * 3 * H * F + shared) + V * H
    module = LitCausalLM(str(tmp_path), pretrained=False)
    for length in (24, 4096):
        assert module.flops_per_sample(length) == 6 * length * visited + L * 12 * length**2 * H
    assert module.model is None
    frozen = LitCausalLM(
        str(tmp_path), pretrained=False, adapter=LoraOptions(r=1, target_modules=["q_proj"])
    )
    assert 4 * 24 * visited < frozen.flops_per_sample(24) < 5 * 24 * visited + L * 12 * 24**2 * H, (
        "gradients of frozen weights are counted"
    )


def test_value_dependent_model_warns_and_has_no_flops(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=V).save_pretrained(tmp_path)
    module = LitCausalLM(str(tmp_path), pretrained=False)

    def looks(model, length):
        return torch.zeros(int(torch.ones(1).item()))

    monkeypatch.setattr(module, "_logits_of_zeros", looks)
    with pytest.warns(UserWarning, match="operations of gpt2 could not be counted"):
        assert module.flops_per_sample(8) == 0
    assert module._operations == Operations(per_token=0, per_pair=0)
