"""Weights with peft's adapters merged in equal those of peft, or are refused."""

import copy

import pytest
import torch

from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.exchange import adapter_weights, merged_rectangles
from lightning_ptdp.parameters.placement import Placement
from tests.huggingface.runs import make_model
from tests.optional import needs

pytestmark = needs("peft")

QUERIES = {"target_modules": ["q_proj"]}


def _merged(model):
    tensors = {
        name: (value.detach(), Placement.replicated(tuple(value.shape)))
        for name, value in model.named_parameters()
    }
    return {one.name: one.to_write() for one in merged_rectangles(model, tensors)}


@pytest.mark.parametrize("active", ["default", "other"])
def test_active_adapter_is_merged_and_others_are_left_out(active):
    import peft

    config = peft.LoraConfig(modules_to_save=["lm_head"], **QUERIES)
    model = peft.get_peft_model(make_model("llama"), config)
    model.add_adapter("other", config)
    torch.manual_seed(1)
    for name, value in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(value)
    model.set_adapter(active)
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    torch.testing.assert_close(
        _merged(model), {f"base_model.model.{name}": value for name, value in merged.items()}
    )


def _lora(**options):
    import peft

    return peft.LoraConfig(**{**QUERIES, **options})


@pytest.mark.parametrize(
    ("config", "options", "layer"),
    [
        (lambda peft: peft.IA3Config(**QUERIES, feedforward_modules=[]), {}, r"self_attn\.q_proj"),
        (lambda peft: peft.LoHaConfig(**QUERIES), {}, r"self_attn\.q_proj"),
        (lambda peft: peft.AdaLoraConfig(**QUERIES, total_step=9), {}, r"self_attn\.q_proj"),
        (lambda _: _lora(lora_bias=True), {"attention_bias": True}, r"self_attn\.q_proj"),
        (lambda _: _lora(trainable_token_indices={"embed_tokens": [1]}), {}, r"embed_tokens"),
        (
            lambda _: _lora(target_modules=["lm_head"]),
            {"tie_word_embeddings": True},
            r"base_model\.model\.lm_head",
        ),
    ],
)
def test_adapter_that_would_be_lost_is_refused(config, options, layer):
    import peft

    model = peft.get_peft_model(make_model("llama", **options), config(peft))
    with pytest.raises(CheckpointError, match=rf"the adapter of '.*{layer}.*' is not a simple"):
        _merged(model)


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ("default_head.q.lora_A.default.weight", "default_head.q.lora_A.weight"),
        ("a.default.q.lora_embedding_B.default", "a.default.q.lora_embedding_B"),
        ("q.lora_magnitude_vector.default.weight", "q.lora_magnitude_vector"),
        ("head.modules_to_save.default.weight", "head.weight"),
    ],
)
def test_name_of_adapter_leaves_names_of_modules(ours, expected):
    assert adapter_weights._peft_name(f"model/model.{ours}") == f"base_model.model.{expected}"
