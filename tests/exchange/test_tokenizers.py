"""Tests of the tokenizer files in an export, as transformers reads them."""

import ast
import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from lightning_ptdp.base.data_record import WORKING_FOLDER
from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.data import Tokenizer
from lightning_ptdp.data.huggingface_tokenizer import HuggingFaceTokenizer
from lightning_ptdp.data.pairs import SPECIAL_PIECES
from lightning_ptdp.exchange.tokenizers import (
    chat_template,
    tokenizer_files,
    tokenizer_folder,
    tokenizer_of,
)
from lightning_ptdp.models.tiny import make_tiny

TEXTS = [
    "",
    "def main():\n    return 1\n",
    "  h\u00e9llo w\u00f6rld\t x",
    "\u65e5\u672c\u8a9e and \U0001f600",
    "a  b   c\n\n\nclass X: pass",
    Path(ast.__file__).read_text()[:50_000],
]


def read_by_transformers(ours, folder, kind):
    ours.save(folder / "data")
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    for name, content in tokenizer_of(
        {"datamodule_hyper_parameters": {"data_dir": str(folder / "data")}}
    ).items():
        (folder / name).write_bytes(content)
    return AutoTokenizer.from_pretrained(folder)


def test_transformers_gives_equal_token_ids(tmp_path):
    ours = Tokenizer.train(TEXTS * 20, vocabulary_size=600)
    theirs = read_by_transformers(ours, tmp_path, "gpt2")
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text) == {"input_ids": ids, "attention_mask": [1] * len(ids)}
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.eos_id


def test_bert_tokenizer_builds_texts_and_pairs_as_in_training(tmp_path):
    ours = Tokenizer.train(TEXTS * 20, vocabulary_size=600, control_symbols=SPECIAL_PIECES)
    theirs = read_by_transformers(ours, tmp_path, "bert")
    cls, sep, mask = map(ours.control_id, SPECIAL_PIECES)
    for first, second in pairwise(TEXTS):
        a, b = ours.encode(first), ours.encode(second)
        assert theirs(first)["input_ids"] == [cls, *a, sep]
        together = theirs(first, second)
        assert together["input_ids"] == [cls, *a, sep, *b, sep]
        assert together["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)
        assert theirs.decode(a) == first
    assert theirs("a [MASK] b")["input_ids"] == [
        cls,
        *ours.encode("a "),
        mask,
        *ours.encode(" b"),
        sep,
    ]
    assert (theirs.mask_token_id, theirs.pad_token_id) == (mask, ours.pad_id)


def test_missing_data_gives_no_tokenizer(tmp_path):
    assert tokenizer_of({}) == {}
    with pytest.warns(UserWarning, match="has no tokenizer, because the folder .*gone, does not"):
        assert (
            tokenizer_of({"datamodule_hyper_parameters": {"data_dir": str(tmp_path / "gone")}})
            == {}
        )


def test_relative_folder_is_that_of_the_training(tmp_path, monkeypatch):
    """Another folder of the same name, where the command runs, has another tokenizer."""
    trained, here = tmp_path / "trained", tmp_path / "here"
    for folder in (trained, here):
        (folder / "tokens").mkdir(parents=True)
    monkeypatch.chdir(here)
    state = {
        "datamodule_hyper_parameters": {"data_dir": "tokens"},
        "TextDataModule": {WORKING_FOLDER: str(trained)},
    }
    assert tokenizer_folder(state) == str(trained / "tokens")
    state["TextDataModule"] = {WORKING_FOLDER: str(tmp_path / "another machine")}
    assert tokenizer_folder(state) == "tokens"


def test_chat_template_is_that_of_the_training(tmp_path, monkeypatch):
    """It is exported also if the command runs in another folder, and without a model's folder."""
    for folder in ("trained", "here"):
        (tmp_path / folder).mkdir()
    (tmp_path / "trained" / "mine.jinja").write_text("mine")
    monkeypatch.chdir(tmp_path / "here")
    state = {
        "datamodule_hyper_parameters": {"chat_template": "mine.jinja"},
        "ChatDataModule": {WORKING_FOLDER: str(tmp_path / "trained")},
    }
    assert chat_template(state) == str(tmp_path / "trained" / "mine.jinja")
    assert tokenizer_of(state) == {"chat_template.jinja": b"mine"}
    (tmp_path / "trained" / "mine.jinja").unlink()
    for gone in ("mine.jinja", "{{ a template }}" * 99):
        state["datamodule_hyper_parameters"]["chat_template"] = gone
        with pytest.warns(UserWarning, match="lacks the chat template of the training"):
            assert tokenizer_of(state) == {}


def test_tokenizer_of_data_replaces_tokenizer_of_model(tmp_path):
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "vocab.json",
        "chat_template.jinja",
        "model.safetensors",
    ):
        (tmp_path / name).write_text(f"the model's {name}")
    beside = tokenizer_files(tmp_path)
    assert sorted(beside) == [
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "vocab.json",
    ]
    Tokenizer.train(TEXTS * 20, vocabulary_size=600).save(tmp_path / "data")
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    state = {
        "datamodule_hyper_parameters": {
            "data_dir": str(tmp_path / "data"),
            "chat_template": str(tmp_path / "mine.jinja"),
        }
    }
    given = tokenizer_files(tmp_path / "config.json", state)
    assert given == {
        **tokenizer_of(state),
        "generation_config.json": b"the model's generation_config.json",
        "chat_template.jinja": b"{{ messages }}",
    }
    HuggingFaceTokenizer(_tiny(tmp_path / "tiny")).save(tmp_path / "prepared")
    state["datamodule_hyper_parameters"]["data_dir"] = str(tmp_path / "prepared")
    assert "config.json" not in tokenizer_of(state)  # it would be taken for the model's
    assert "tokenizer.json" in tokenizer_of(state)


@pytest.mark.parametrize(
    "name", ["vocab.txt", "merges.txt", "tokenizer_config.json", "generation_config.json"]
)
def test_link_to_file_outside_folder_is_refused(tmp_path, name):
    (tmp_path / "secret").write_text("not for you")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(
        CheckpointError,
        match=rf"{name} cannot be read: it is a link to .*/secret, which is outside its folder",
    ):
        tokenizer_files(folder)


def test_link_into_hub_cache_is_exported(tmp_path):
    snapshot, blobs = (
        tmp_path / "models--a--b" / "snapshots" / "0123",
        tmp_path / "models--a--b" / "blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "4567").write_text("{}")
    (snapshot / "generation_config.json").symlink_to(Path("../../blobs/4567"))
    (tmp_path / "named by the user").symlink_to(snapshot)
    assert (
        tokenizer_files(snapshot)
        == tokenizer_files(tmp_path / "named by the user")
        == {"generation_config.json": b"{}"}
    )


def test_pipe_and_huge_file_in_model_folder_are_refused(tmp_path):
    os.mkfifo(tmp_path / "generation_config.json")
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json cannot be read: it is not a regular file"
    ):
        tokenizer_files(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    with open(tmp_path / "vocab.txt", "wb") as stream:
        stream.truncate(1 << 42)
    with pytest.raises(
        CheckpointError,
        match=r"vocab\.txt has 4398046511104 bytes, more than the limit of 134217728",
    ):
        tokenizer_files(tmp_path)


def _tiny(folder):
    make_tiny(folder, vocabulary_size=300)
    return folder
