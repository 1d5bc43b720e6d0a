"""BERT with post- and pre-LayerNorm in Hugging Face folders: equal weights and logits."""

import json
from dataclasses import replace

import pytest
import torch

from lightning_ptdp.checkpoint import (
    CheckpointError,
    read_full,
    read_metadata,
    read_state,
    save_checkpoint,
)
from lightning_ptdp.cli import main
from lightning_ptdp.exchange import from_huggingface, to_huggingface
from lightning_ptdp.models import BertConfig, LitBert
from tests.checkpoint.layouts import shard
from tests.folders import read_huggingface
from tests.models.hf_models import randomized

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocabulary_size": 61,
    "sequence_length": 20,
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "ffn_hidden_size": 40,
}
OURS = {
    "post": BertConfig.original(**SIZES),
    "post, tanh, three segments": BertConfig.original(
        **SIZES, gelu="tanh", num_segments=3, attention_dropout=0.2
    ),
    "pre": BertConfig.megatron(**SIZES),
}
THEIRS = {"post": "Bert", "pre": "MegatronBert"}
VOCABULARY = ("embeddings.token.weight", "masked_head.decoder.bias")


def _hugging_face(kind, **changes):
    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": 61,
            "max_position_embeddings": 20,
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 40,
            **changes,
        }
    )
    return randomized(getattr(transformers, f"{kind}ForPreTraining")(config)).eval()


def _inputs():
    """Return two rows, the second one with padding."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([[20], [13]])
    return {
        "input_ids": torch.randint(61, (2, 20), generator=generator),
        "token_type_ids": (torch.arange(20) >= 9).long().expand(2, 20).contiguous(),
        "attention_mask": (torch.arange(20) < lengths).long(),
    }


def _same_logits(ours, theirs):
    with torch.no_grad():
        one, other = ours(_inputs()), theirs(**_inputs())
    torch.testing.assert_close(one.masked, other.prediction_logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one.order, other.seq_relationship_logits, rtol=1e-4, atol=1e-4)


def _ours(checkpoint):
    """Build the module from the checkpoint alone."""
    module = LitBert(**read_state(checkpoint)["hyper_parameters"])
    module.configure_model()
    module.load_state_dict(read_full(checkpoint))
    return module.eval()


def _module(config):
    module = LitBert(config)
    module.configure_model()
    return randomized(module).eval()


def _save(module, path, *, size=1, rank=0):
    """Save the module's checkpoint, its vocabulary padded and sharded over ``size`` ranks."""
    state = {
        name: value
        for name, value in module.state_dict().items()
        if name != "model.masked_head.decoder.weight"
    }
    tensors = {
        f"model/{name}": shard(
            value, "vocabulary" if name.endswith(VOCABULARY) else "replicated", size=size, rank=rank
        )
        for name, value in state.items()
    }
    aliases = {"model.masked_head.decoder.weight": "model.embeddings.token.weight"}
    save_checkpoint(
        path,
        tensors=tensors,
        state={"hyper_parameters": dict(module.hparams)},
        metadata={"aliases": aliases},
    )


@pytest.mark.parametrize(
    ("kind", "changes"), [("Bert", {}), ("Bert", {"hidden_act": "gelu_new"}), ("MegatronBert", {})]
)
def test_hugging_face_model_round_trip(kind, changes, tmp_path):
    theirs, folder = _hugging_face(kind, **changes), tmp_path / "hf"
    theirs.save_pretrained(folder, max_shard_size="20KB")
    from_huggingface(folder, tmp_path / "ours")
    _same_logits(_ours(tmp_path / "ours"), theirs)

    to_huggingface(tmp_path / "ours", tmp_path / "back", shard_bytes=15_000)
    before, after = read_huggingface(folder), read_huggingface(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    again = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "back").eval()
    assert type(again) is type(theirs)
    # Not bitwise equal: the two tanh forms of GELU in transformers differ in operation order.
    torch.testing.assert_close(
        again(**_inputs()).prediction_logits,
        theirs(**_inputs()).prediction_logits,
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("name", OURS)
def test_lit_bert_round_trip(name, tmp_path):
    module = _module(OURS[name])
    _save(module, tmp_path / "ours")
    to_huggingface(tmp_path / "ours", tmp_path / "theirs")
    model = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "theirs").eval()
    assert type(model).__name__ == f"{THEIRS[module.config.norm_order]}ForPreTraining"
    _same_logits(module, model)
    from_huggingface(tmp_path / "theirs", tmp_path / "back")
    found = read_full(tmp_path / "back")
    assert found.keys() == module.state_dict().keys()
    assert all(torch.equal(found[key], value) for key, value in module.state_dict().items())
    assert read_metadata(tmp_path / "back").tensors == read_metadata(tmp_path / "ours").tensors
    config = module.config
    assert _ours(tmp_path / "back").config == replace(
        config, attention_dropout=config.attention_dropout_rate
    )


def _save_in_two(rank, path):
    _save(_module(OURS["post"]), path, size=2, rank=rank)


def test_vocabulary_padding_is_removed_on_export(pool, tmp_path):
    pool.run(_save_in_two, world_size=2, args=(tmp_path / "ours",))
    assert (
        main(["convert", str(tmp_path / "ours"), str(tmp_path / "hf"), "--shard_size", "15KB"]) == 0
    )
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    found = read_huggingface(tmp_path / "hf")
    assert (
        found["bert.embeddings.word_embeddings.weight"].shape,
        found["cls.predictions.bias"].shape,
    ) == ((61, 32), (61,))
    _same_logits(
        _module(OURS["post"]),
        transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "hf").eval(),
    )
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "back")]) == 0
    _same_logits(_ours(tmp_path / "back"), _hugging_face_of(tmp_path / "hf"))


def _hugging_face_of(folder):
    return transformers.BertForPreTraining.from_pretrained(folder).eval()


def test_older_parameter_names_are_read(tmp_path):
    """Google's files have gamma and beta, the tied decoder and position ids."""
    from safetensors.torch import load_file, save_file

    theirs, file = _hugging_face("Bert"), tmp_path / "hf" / "model.safetensors"
    theirs.save_pretrained(tmp_path / "hf")
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in load_file(file).items()
    }
    older["cls.predictions.decoder.weight"] = older[
        "bert.embeddings.word_embeddings.weight"
    ].clone()
    older["cls.predictions.decoder.bias"] = older["cls.predictions.bias"].clone()
    older["bert.embeddings.position_ids"] = torch.arange(20)[None]
    save_file(older, file)
    from_huggingface(tmp_path / "hf", tmp_path / "ours")
    _same_logits(_ours(tmp_path / "ours"), theirs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"hidden_act": "relu"},
            r"hidden_act is 'relu', but must be one of \['gelu', 'gelu_new', 'gelu_pytorch_tanh'\]",
        ),
        (
            {"position_embedding_type": "relative_key"},
            r"position_embedding_type='relative_key' is not supported: our BERT needs",
        ),
        (
            {"is_decoder": True},
            r"is_decoder=True is not supported: our BERT needs is_decoder=False",
        ),
        (
            {"tie_word_embeddings": False},
            r"tie_word_embeddings=False is not supported: our BERT needs tie_word_embeddings=True",
        ),
        ({"num_attention_heads": 5}, r"hidden_size=32 is not divisible by num_heads=5"),
        ({"num_hidden_layers": 3}, r"lacks \['bert\.encoder\.layer\.2\."),
        ({"model_type": "megatron-bert"}, r"lacks \['bert\.encoder\.layer\.0\.attention\.ln"),
    ],
)
def test_unsupported_config_is_refused(tmp_path, changes, words):
    _hugging_face("Bert").save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match=words):
        from_huggingface(tmp_path / "hf", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_files_without_heads_are_refused(tmp_path):
    _hugging_face("Bert").bert.save_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match=r"lacks \['cls\.predictions\.transform\.dense"):
        from_huggingface(tmp_path / "bare", tmp_path / "ours")
