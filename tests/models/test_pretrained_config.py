"""Checks of a foreign model's configuration against its weights, before the model is built."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.exchange import HuggingFaceNames, HuggingFaceWeights, convert
from lightning_ptdp.models import LitCausalLM, make_tiny
from lightning_ptdp.models.pretrained_config import check_sizes

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(folder, vocabulary_size=300)
    return folder


@pytest.fixture
def model(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "model")


def change(model, changes):
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers=1000000000 is more than 256, but there are only 40 tensors of "
            "weights",
        ),
        (
            {"intermediate_size": -5},
            "intermediate_size=-5 is not a valid size. Give an integer from 0",
        ),
        ({"hidden_size": 10**30}, "hidden_size=10*.* is not a valid size"),
        ({"hidden_size": 10**400}, "hidden_size=10*.* is not a valid size"),
        (
            {"text_config": {"num_attention_heads": -1}},
            r"text_config\.num_attention_heads=-1 is not a valid size",
        ),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is not a valid value"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf is not a valid value"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06 is not a valid value"),
    ],
)
def test_invalid_number_is_refused_before_model_is_built(model, changes, words, monkeypatch):
    change(model, changes)
    monkeypatch.setattr(
        transformers.AutoConfig,
        "from_pretrained",
        lambda *_, **__: pytest.fail("transformers was asked"),
    )
    with pytest.raises(ValueError, match=rf"path='.*/model': config\.json: {words}"):
        LitCausalLM(str(model)).configure_model()


def test_step_count_is_not_checked_as_epsilon():
    check_sizes({"num_inference_steps": 50, "timesteps": 1000, "layer_norm_epsilon": 1e-5})


def test_sizes_without_weights_are_bounded():
    with pytest.raises(ValueError, match=r"config\.num_hidden_layers=1000000000 is more than 4096"):
        LitCausalLM(config={"model_type": "llama", "num_hidden_layers": 10**9})


@pytest.mark.parametrize("changes", [{"hidden_act": "nothing"}, {"pad_token_id": 10**6}])
def test_unbuildable_configuration_raises_one_line_error(model, changes):
    change(model, changes)
    with pytest.raises(
        ValueError,
        match=r"path='.*': the model of its configuration cannot be built \(.*\)$",
    ):
        LitCausalLM(str(model)).configure_model()


def test_weights_of_other_shapes_raise_one_line_error(model):
    change(model, {"vocab_size": 500})
    with pytest.raises(
        ValueError, match=r"path='.*': the shapes of the weights differ from config\.json$"
    ):
        LitCausalLM(str(model)).configure_model()


def test_quantization_config_of_plain_weights_is_refused(model, tmp_path):
    change(model, {"quantization_config": {"quant_method": "fp8"}})
    words = (
        r"config\.json does not fit the weights: it has quantization_config \(fp8\), but the dtypes are "
        r"float32. Remove this entry"
    )
    with pytest.raises(CheckpointError, match=words):
        HuggingFaceWeights.open(model, HuggingFaceNames(aliases={}))
    for names in ("ptdp", "hf"):
        with pytest.raises(CheckpointError, match=words):
            convert(model, tmp_path / "checkpoint", names=names)


def test_shared_layers_may_outnumber_tensors(tmp_path):
    sizes = {
        "hidden_size": 8,
        "embedding_size": 4,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 40,
    }
    config = transformers.AlbertConfig(num_hidden_layers=60, **sizes)
    transformers.AlbertForMaskedLM(config).save_pretrained(tmp_path)
    from lightning_ptdp.models import LitMaskedLM

    lit = LitMaskedLM(str(tmp_path))
    lit.configure_model()
    assert lit.model.config.num_hidden_layers == 60


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_pipe_or_link_in_model_folder_is_refused(model, tmp_path, name):
    (model / name).unlink()
    os.mkfifo(model / name)
    with pytest.raises(ValueError, match=rf"{name} cannot be read: it is not a regular file"):
        LitCausalLM(str(model)).configure_model()
    (model / name).unlink()
    (tmp_path / "secret").write_text("{}")
    (model / name).symlink_to(tmp_path / "secret")
    with pytest.raises(
        ValueError,
        match=rf"{name} cannot be read: it is a link to .*secret, which is outside its folder",
    ):
        LitCausalLM(str(model)).configure_model()


def test_code_in_model_folder_is_refused_without_prompt(model, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked"))
    (model / "configuration_mine.py").write_text("raise AssertionError('the code was run')")
    change(model, {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}})
    with pytest.raises(
        ValueError,
        match=r"has no model_type='mine', and config\.json refers to code in the model's folder "
        r"\(auto_map\), which is not run",
    ):
        LitCausalLM(str(model)).configure_model()


def test_code_next_to_known_model_is_not_run(model, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked"))
    change(model, {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}})
    lit = LitCausalLM(str(model), pretrained=False)
    with torch.device("meta"):
        lit.configure_model()
    assert type(lit.model).__name__ == "LlamaForCausalLM"


def test_folder_may_be_created_by_two_processes(tmp_path, monkeypatch):
    rename = Path.rename

    def rename_late(part, target):
        shutil.copytree(part, target)
        return rename(part, target)

    monkeypatch.setattr(Path, "rename", rename_late)
    make_tiny(tmp_path / "tiny", vocabulary_size=300)
    assert (tmp_path / "tiny" / "config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
