"""Pretraining text with a Hugging Face tokenizer."""

import json
import os
import pickle
import shutil
import sysconfig
from pathlib import Path

import pytest

from lightning_ptdp.data import (
    MixtureDataModule,
    PrepareConfig,
    TextDataModule,
    TokenStream,
    prepare,
)
from lightning_ptdp.data.data_error import TokenizerError
from lightning_ptdp.data.huggingface_tokenizer import HuggingFaceTokenizer, load_tokenizer
from lightning_ptdp.models import make_tiny

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    make_tiny(folder, vocabulary_size=600)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Write three real files and text in other scripts."""
    folder = tmp_path_factory.mktemp("texts")
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("bisect.py", "keyword.py", "this.py"):
        (folder / f"{name}.txt").write_text((library / name).read_text())
    (folder / "z.txt").write_text("Grüße, 你好 😀 \t  \n\n ende\u2581")
    return folder


def test_ids_match_transformers_and_documents_end_with_eos(model, texts, tmp_path):
    made = prepare(
        PrepareConfig(
            output=tmp_path / "store",
            source=str(texts),
            tokenizer_dir=model,
            vocabulary_size=None,
            validation_fraction=0.2,
        )
    )
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    split = {
        name: TokenStream(made.folder, split=name, sequence_length=1)._tokens
        for name in ("train", "validation")
    }
    stored = {
        name: [int(token) for chunk in chunks for token in chunk] for name, chunks in split.items()
    }
    documents = [_until(tokens, theirs.eos_token_id) for tokens in stored.values()]
    found = sorted("".join(theirs.decode(ids)) for group in documents for ids in group)
    expected = {
        file.read_text(): theirs(file.read_text(), add_special_tokens=False)["input_ids"]
        for file in texts.iterdir()
    }
    whole = [text for text in found if text in expected]
    assert len(whole) >= 3, "more than one document was split"
    ids = [ids for group in documents for ids in group]
    assert all(expected[text] in ids for text in whole)
    assert made.manifest.vocabulary_size == 600 == len(theirs)


def _until(tokens, end):
    documents = [[]]
    for token in tokens:
        if token == end:
            documents.append([])
        else:
            documents[-1].append(token)
    assert not documents[-1], "the last token is not the end token"
    return documents[:-1]


def test_prepared_folder_contains_tokenizer(model, texts, tmp_path):
    data = TextDataModule(
        data_dir=str(tmp_path / "store"),
        source=str(texts),
        tokenizer_dir=str(model),
        vocabulary_size=None,
        sequence_length=16,
        micro_batch_size=2,
        validation_fraction=0.2,
        prepare_workers=2,
    )
    data.check()
    data.prepare_data()
    data.setup()
    assert data.vocabulary_size == 600
    kept = load_tokenizer(tmp_path / "store")
    assert (
        isinstance(kept, HuggingFaceTokenizer)
        and kept.fingerprint == HuggingFaceTokenizer(model).fingerprint
    )
    assert pickle.loads(pickle.dumps(kept)).decode(kept.encode("def f(x): ...")) == "def f(x): ..."
    corpora = [{"data_dir": str(tmp_path / "store"), "weight": 1.0}]
    mixture = MixtureDataModule(corpora=corpora, sequence_length=16, micro_batch_size=2)
    assert mixture.tokenizer.fingerprint == kept.fingerprint
    file = tmp_path / "store" / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(ValueError, match=r"tokenizer.json has"):
        data.setup()


def test_unusable_tokenizer_is_refused(model, texts, tmp_path):
    bare = transformers.AutoTokenizer.from_pretrained(model)
    bare.eos_token = None
    bare.save_pretrained(tmp_path / "bare")
    for changes, words in (
        (
            {},
            r"has a vocabulary of 600, but vocabulary_size=8192\. Use that of the tokenizer",
        ),
        (
            {"vocabulary_size": None, "control_symbols": ("[MASK]",)},
            r"is from Hugging Face and has no control symbol '\[MASK\]'",
        ),
        (
            {"vocabulary_size": None, "tokenizer_dir": None},
            "vocabulary_size=None is the vocabulary size of tokenizer_dir, which is not set",
        ),
        ({"tokenizer_dir": texts}, "has no tokenizer"),
        (
            {"vocabulary_size": None, "tokenizer_dir": tmp_path / "bare"},
            "has no eos_token to end documents with",
        ),
    ):
        given = {"source": str(texts), "tokenizer_dir": model, **changes}
        with pytest.raises(ValueError, match=words):
            prepare(PrepareConfig(output=tmp_path / "store", **given))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare"]


@pytest.fixture
def folder(model, tmp_path):
    """Return a copy of the model folder that a test may change."""
    return Path(shutil.copytree(model, tmp_path / "model"))


@pytest.mark.parametrize(
    "name", ["vocab.txt", "merges.txt", "tokenizer.json", "config.json", "special_tokens_map.json"]
)
def test_link_to_file_outside_folder_is_refused(folder, tmp_path, name):
    (tmp_path / "secret").write_text("not for you")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(
        TokenizerError,
        match=rf"{name} cannot be read: it is a link to .*/secret, which is outside its folder",
    ):
        HuggingFaceTokenizer(folder)


def test_tokenizer_in_hub_cache_is_read(model, tmp_path):
    cache = tmp_path / "models--a--b"
    snapshot, blobs = cache / "snapshots" / "0123", cache / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(model, blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs", file.name))
    found = HuggingFaceTokenizer(snapshot)
    assert found.fingerprint == HuggingFaceTokenizer(model).fingerprint and found.encode("a b")
    elsewhere = tmp_path / "elsewhere"
    blobs.rename(elsewhere)
    blobs.symlink_to(elsewhere)
    with pytest.raises(TokenizerError, match="outside its folder"):
        HuggingFaceTokenizer(snapshot)


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "sentencepiece.spm"])
def test_pipe_in_tokenizer_folder_is_refused_without_blocking(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(TokenizerError, match=rf"{name} cannot be read: it is not a regular file"):
        HuggingFaceTokenizer(folder)


def test_huge_file_in_tokenizer_folder_is_refused(folder):
    with open(folder / "merges.txt", "wb") as stream:
        stream.truncate(1 << 42)
    with pytest.raises(
        TokenizerError,
        match=r"merges.txt has 4398046511104 bytes, more than the limit of 134217728",
    ):
        HuggingFaceTokenizer(folder)


def test_custom_code_of_tokenizer_is_refused_without_prompt(folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "mine"}))
    with pytest.raises(
        TokenizerError,
        match=r"refers to its own code \(auto_map\), which is not run. Use a model whose tokenizer",
    ):
        HuggingFaceTokenizer(folder).encode("a")
