"""Conversion from and to Hugging Face folders: equal weights and logits for any shard size."""

import json
import shutil
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from lightning_ptdp.checkpoint import (
    CheckpointError,
    read_full,
    read_metadata,
    read_state,
)
from lightning_ptdp.exchange import (
    from_huggingface,
    open_native,
    to_huggingface,
    verify_export,
)
from lightning_ptdp.exchange.native_models import model_of_hyper_parameters
from lightning_ptdp.models import LitGPT
from lightning_ptdp.models.model_config import GPTConfig
from tests.checkpoint.layouts import save, shard
from tests.folders import read_huggingface
from tests.models.configs import GPT2, LLAMA, VARIANTS
from tests.models.hf_models import hf_gpt2, hf_llama, randomized

transformers = pytest.importorskip("transformers")


def _tied_llama():
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=24,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_theta=50_000.0,
    )
    return randomized(transformers.LlamaForCausalLM(config)).to(torch.bfloat16)


def _mixtral():
    config = transformers.MixtralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=24,
    )
    return randomized(transformers.MixtralForCausalLM(config))


MODELS = {
    "mixtral": _mixtral,
    "gpt2": hf_gpt2,
    "llama": hf_llama,
    "llama, tied, biases, bf16": _tied_llama,
}


@pytest.fixture(scope="module", params=MODELS)
def theirs(request, tmp_path_factory):
    model, folder = MODELS[request.param](), tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder, max_shard_size="30KB")
    return model, folder


def _edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _ours(checkpoint):
    """Build the module from the checkpoint alone."""
    module = LitGPT(**read_state(checkpoint)["hyper_parameters"])
    module.configure_model()
    module.to(next(iter(read_full(checkpoint).values())).dtype)
    module.load_state_dict(read_full(checkpoint))
    return module.eval()


def test_hugging_face_model_round_trip(theirs, tmp_path):
    model, folder = theirs
    assert (folder / "model.safetensors.index.json").exists()
    from_huggingface(folder, tmp_path / "ours")
    ids = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))
    exact = next(model.parameters()).dtype == torch.float32
    tolerance = 1e-5 if exact else 0.1
    torch.testing.assert_close(
        _ours(tmp_path / "ours")(ids), model(ids).logits, rtol=tolerance, atol=tolerance
    )

    straight, whole = open_native(folder), read_full(tmp_path / "ours")
    aliases = read_metadata(tmp_path / "ours").aliases
    assert {
        name.removeprefix("model/") for name in straight.tensors
    } == whole.keys() - aliases.keys()
    # read like rank 1 of 2, which holds the second half
    for name, entry in straight.tensors.items():
        full = whole[name.removeprefix("model/")]
        local, sharding = shard(
            full, "column" if full.size(0) % 2 == 0 else "replicated", size=2, rank=1
        )
        filled = torch.zeros_like(local)
        straight.fill({name: (filled, sharding)})
        assert entry.shape == tuple(full.shape)
        assert torch.equal(filled, local), name

    to_huggingface(tmp_path / "ours", tmp_path / "back", shard_bytes=20_000)
    before, after = read_huggingface(folder), read_huggingface(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype
        assert torch.equal(value, after[name]), name
    first, again = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
        for path in (folder, tmp_path / "back")
    )
    assert type(again) is type(first)
    assert torch.equal(again(ids).logits, first(ids).logits)


def test_export_is_sharded_with_consistent_index(theirs, tmp_path):
    from_huggingface(theirs[1], tmp_path / "ours")
    to_huggingface(tmp_path / "ours", tmp_path / "many", shard_bytes=20_000)
    to_huggingface(tmp_path / "ours", tmp_path / "one")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        ".lightning-ptdp",
        "config.json",
        "model.safetensors",
    ]
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    values = read_huggingface(tmp_path / "many")
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in values.values())
    assert index["weight_map"].keys() == values.keys()
    assert (
        len(set(index["weight_map"].values()))
        == len(list((tmp_path / "many").glob("*.safetensors")))
        > 1
    )
    sizes = Counter[str]()
    for name, file in index["weight_map"].items():
        sizes[file] += values[name].nbytes
    assert max(sizes.values()) <= max(20_000, *(value.nbytes for value in values.values()))


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama, tied, biases, one kv head", "mixtral"])
def test_lit_gpt_round_trip(name, tmp_path):
    config = VARIANTS[name]
    module = LitGPT(config)
    module.configure_model()
    randomized(module)
    state = dict(module.state_dict())
    aliases = {"model.head.weight": "model.wte.weight"} if config.tie_embeddings else {}
    save(
        tmp_path / "ours",
        {key: value for key, value in state.items() if key not in aliases},
        state={"hyper_parameters": dict(module.hparams)},
        metadata={"aliases": aliases},
    )
    to_huggingface(tmp_path / "ours", tmp_path / "theirs")
    assert "are equal" in verify_export(tmp_path / "ours", tmp_path / "theirs")
    ids = torch.randint(config.vocabulary_size, (2, 16), generator=torch.Generator().manual_seed(1))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    torch.testing.assert_close(model(ids).logits, module(ids), rtol=1e-5, atol=1e-5)
    from_huggingface(tmp_path / "theirs", tmp_path / "back")
    found = read_full(tmp_path / "back")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], value) for key, value in state.items())
    assert read_metadata(tmp_path / "back").tensors == read_metadata(tmp_path / "ours").tensors
    wanted = replace(
        config,
        ffn_hidden_size=config.expert_size,
        expert_hidden_size=None,
        capacity_factor=None,
        num_kv_heads=config.kv_heads if name != "gpt2" else None,
    )
    assert GPTConfig(**read_state(tmp_path / "back")["hyper_parameters"]["config"]) == wanted


@pytest.mark.parametrize(
    "changes",
    [
        {"shared_experts": 1},
        {"dense_layers": 1},
        {"router_score": "sigmoid"},
        {"balance": "bias"},
        {"experts_per_token": 1},
    ],
    ids=str,
)
def test_unsupported_expert_options_are_refused(changes, tmp_path):
    config = replace(VARIANTS["mixtral"], **changes)
    ((name, value),) = changes.items()
    with pytest.raises(CheckpointError, match=rf"Mixtral.* no equivalent of {name}={value!r}"):
        model_of_hyper_parameters({"config": asdict(config)}).write()


def test_missing_expert_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    _mixtral().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"lacks \['model\.layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight'\]",
    ):
        open_native(tmp_path)


def test_bare_model_with_mask_buffers_and_tied_head_is_read(tmp_path):
    model = hf_gpt2()
    model.transformer.save_pretrained(tmp_path / "bare")
    from safetensors.torch import load_file, save_file

    file = tmp_path / "bare" / "model.safetensors"
    tensors = load_file(file)
    more = {"h.0.attn.bias": torch.ones(1, 1, 24, 24), "lm_head.weight": tensors["wte.weight"] + 0}
    save_file({**tensors, **more}, file)
    from_huggingface(tmp_path / "bare", tmp_path / "ours")
    model.save_pretrained(tmp_path / "whole")
    from_huggingface(tmp_path / "whole", tmp_path / "other")
    bare, whole = read_full(tmp_path / "ours"), read_full(tmp_path / "other")
    assert bare.keys() == whole.keys()
    assert all(torch.equal(bare[name], whole[name]) for name in whole)


def test_wrapped_hugging_face_module_keeps_names(tmp_path):
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=20,
    )
    model = randomized(transformers.BertForMaskedLM(config))
    model.save_pretrained(tmp_path / "bert")
    from_huggingface(tmp_path / "bert", tmp_path / "ours", names="hf", prefix="net.")
    wrapper = torch.nn.Module()
    wrapper.net = transformers.BertForMaskedLM(config)
    wrapper.load_state_dict(read_full(tmp_path / "ours"))
    ids = torch.randint(50, (2, 10))
    assert torch.equal(wrapper.net.eval()(ids).logits, model(ids).logits)
    (tmp_path / "bert" / "tokenizer_config.json").write_text("{}")
    to_huggingface(tmp_path / "ours", tmp_path / "back", config=tmp_path / "bert")
    assert (tmp_path / "back" / "tokenizer_config.json").exists(), (
        "the tokenizer files are not exported"
    )
    assert "every tensor equal" in verify_export(
        tmp_path / "ours", tmp_path / "back", config=tmp_path / "bert"
    )
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "back").eval()
    assert torch.equal(again(ids).logits, model(ids).logits)


LAST = "net.transformer.ln_f.bias"


@pytest.mark.parametrize(
    ("changes", "config", "words"),
    [
        (
            {"net.transformer.h.0.lora_A.weight": torch.ones(2, 2)},
            {},
            "has the unknown 'transformer.h.0.lora_A.weight'",
        ),
        ({LAST: None}, {}, "lacks 'transformer.ln_f.bias'"),
        ({LAST: torch.ones(3)}, {}, "'transformer.ln_f.bias' has the shape"),
        ({}, {"architectures": ["Unheard"]}, "unknown to transformers"),
    ],
    ids=["adapter", "missing", "shape", "architecture"],
)
def test_export_not_matching_architecture_is_refused(changes, config, words, tmp_path):
    model = hf_gpt2()
    model.save_pretrained(tmp_path / "base")
    _edit(tmp_path / "base", **config)
    values = {f"net.{name}": value for name, value in model.state_dict().items()} | changes
    del values["net.lm_head.weight"]
    save(tmp_path / "lora", {name: one for name, one in values.items() if one is not None})
    with pytest.raises(CheckpointError, match=words):
        to_huggingface(tmp_path / "lora", tmp_path / "out", config=tmp_path / "base")
    assert not (tmp_path / "out").exists()


def test_lit_gpt_with_adapter_is_not_exported(tmp_path):
    hf_gpt2().save_pretrained(tmp_path / "hf")
    from_huggingface(tmp_path / "hf", tmp_path / "ours")
    values = read_full(tmp_path / "ours") | {"model.h.0.lora_A.weight": torch.ones(2, 2)}
    values.pop("model.head.weight", None)
    save(tmp_path / "lora", values, state=read_state(tmp_path / "ours"))
    with pytest.raises(CheckpointError, match=r"lora_A.*merge adapters"):
        to_huggingface(tmp_path / "lora", tmp_path / "out")


def test_export_converts_dtype(tmp_path):
    hf_llama().save_pretrained(tmp_path / "hf")
    from_huggingface(tmp_path / "hf", tmp_path / "ours")
    to_huggingface(tmp_path / "ours", tmp_path / "half", dtype=torch.bfloat16)
    before, after = read_huggingface(tmp_path / "hf"), read_huggingface(tmp_path / "half")
    assert all(torch.equal(value.bfloat16(), after[name]) for name, value in before.items())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "opt"},
            r"model_type='opt', but models of this package can only be converted from and to 'gpt2', 'llama', "
            r"'mixtral', 'bert', 'megatron-bert'",
        ),
        (
            {"hidden_act": "gelu"},
            r"hidden_act='gelu' is not supported: our GPT needs hidden_act='silu'",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3"}},
            r"rope_type='llama3' is not supported: our GPT needs rope_type='default'",
        ),
        ({"num_hidden_layers": 4}, r"lacks \['model\.layers\.3\."),
        (
            {"num_hidden_layers": 2},
            r"has \['model\.layers\.2\..* which the model of its config\.json does not have",
        ),
        (
            {"vocab_size": 60},
            r"'model\.embed_tokens\.weight' has the shape \(61, 32\), but must have \(60, 32\) according to config\.json",
        ),
        (
            {"num_key_value_heads": 4},
            r"k_proj\.weight' has the shape \(16, 32\), but must have \(32, 32\) according to config\.json",
        ),
    ],
)
def test_unsupported_config_is_refused(tmp_path, changes, words):
    hf_llama().save_pretrained(tmp_path / "hf")
    _edit(tmp_path / "hf", **changes)
    with pytest.raises(CheckpointError, match=words):
        from_huggingface(tmp_path / "hf", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_damaged_folder_is_refused(theirs, tmp_path):
    folder = Path(shutil.copytree(theirs[1], tmp_path / "hf"))
    file = sorted(folder.glob("*.safetensors"))[0]
    content = file.read_bytes()
    for length in (4, 100, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(
            CheckpointError, match=f"{file.name} is not a complete safetensors file"
        ):
            from_huggingface(folder, tmp_path / "ours")
    file.unlink()
    with pytest.raises(
        CheckpointError,
        match=rf"of the \d+ files in .*index\.json, 1 is missing \({file.name}\)",
    ):
        from_huggingface(folder, tmp_path / "ours")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        from_huggingface(folder, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_model_without_hugging_face_equivalent_is_refused(tmp_path):
    config = replace(GPT2, position="rope")
    for hyper_parameters, words in (
        (
            {"config": vars(config)},
            r"no model with norm='layer', position='rope', mlp='gelu', has_experts=False: 'gpt2' "
            r"has .*; 'llama' has",
        ),
        ({"config": vars(replace(GPT2, bias=False))}, r"has biases .* bias=False"),
        (
            {"config": {"hidden_sise": 3}},
            r"not one of a model of this package .* its fields are \['hidden_sise'\]",
        ),
        ({}, r"give that model's config\.json"),
    ):
        save(
            tmp_path / "c",
            {"model.w": torch.ones(2)},
            state={"hyper_parameters": hyper_parameters},
        )
        with pytest.raises(CheckpointError, match=words):
            to_huggingface(tmp_path / "c", tmp_path / "hf")
    assert LLAMA.norm == "rms"
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
