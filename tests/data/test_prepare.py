"""Preparation of a data folder: reproducible, atomic and reused only for equal settings.
Damage is reported."""

import dataclasses
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from lightning_ptdp.data import (
    Corpus,
    CorpusError,
    DataError,
    Manifest,
    StoreError,
    Tokenizer,
    TokenizerError,
    check_prepare,
    prepare,
    verify_store,
)
from lightning_ptdp.data.corpus_build import Builder
from lightning_ptdp.data.manifest import record_files
from lightning_ptdp.data.preparation_work import Reporter
from lightning_ptdp.data.token_store import ChunkMap, read_chunks
from tests.data.conftest import config_of, write_corpus
from tests.data.folders import contents, flip, listed, with_manifest


def test_stored_tokens_decode_to_documents(prepared, corpus):
    tokenizer = Tokenizer.load(prepared.folder)
    texts = {}
    for split in ("train", "validation"):
        reader = ChunkMap(read_chunks(prepared.folder / split, "uint16"), vocabulary_size=320)
        assert len(reader) == prepared.manifest.splits[split].tokens
        ids = np.concatenate(list(reader)).tolist()
        assert ids[-1] == tokenizer.eos_id
        documents = "".join(
            "\0" if token == tokenizer.eos_id else f"{token} " for token in ids
        ).split("\0")[:-1]
        texts[split] = [
            tokenizer.decode([int(token) for token in document.split()]) for document in documents
        ]
        assert len(texts[split]) == prepared.manifest.splits[split].documents
    everything = [document.text for document in Corpus(source=corpus).documents()]
    assert sorted(texts["train"] + texts["validation"]) == sorted(everything)
    assert texts["train"]
    assert texts["validation"]


def test_manifest_describes_prepared_data(prepared, corpus):
    manifest = Manifest.read(prepared.folder)
    assert manifest == prepared.manifest
    assert manifest.vocabulary_size == 320
    assert manifest.settings["source"] == manifest.corpus.source == [str(corpus)]
    assert manifest.corpus.documents == manifest.corpus.files == 40
    assert manifest.tokenizer_fingerprint == Tokenizer.load(prepared.folder).fingerprint
    assert set(manifest.files) == set(contents(prepared.folder)) - {"manifest.json"}
    assert manifest.fingerprint("train") != manifest.fingerprint("validation")
    assert "train tokens" in prepared.summary()


def test_preparation_is_bitwise_reproducible(prepared, corpus, tmp_path):
    before = dict(os.environ)
    lines = []
    again = prepare(config_of(corpus, tmp_path / "deep" / "again"), progress=lines.append)
    assert not again.reused
    assert contents(again.folder) == contents(prepared.folder)
    assert os.environ == before
    assert sorted(os.listdir(tmp_path / "deep")) == ["again"]
    assert any("40 documents" in line for line in lines)


def test_prepared_folder_is_reused(prepared, corpus):
    times = {path: path.stat().st_mtime_ns for path in prepared.folder.rglob("*")}
    assert prepare(config_of(corpus, prepared.folder)).reused
    assert prepare(config_of(corpus, prepared.folder, overwrite=True)).reused
    assert {path: path.stat().st_mtime_ns for path in prepared.folder.rglob("*")} == times


def test_other_settings_need_overwrite(corpus, tmp_path):
    first = prepare(config_of(corpus, tmp_path / "store"))
    with pytest.raises(
        StoreError, match=r"vocabulary_size was 320 and is now 300.*--data.overwrite"
    ):
        prepare(config_of(corpus, first.folder, vocabulary_size=300))
    assert verify_store(first.folder).vocabulary_size == 320
    replaced = prepare(config_of(corpus, first.folder, vocabulary_size=300, overwrite=True))
    assert not replaced.reused
    assert verify_store(first.folder).vocabulary_size == 300
    assert os.listdir(tmp_path) == ["store"]


def test_changed_source_is_refused_but_missing_source_is_not(tmp_path):
    corpus = write_corpus(tmp_path / "text", documents=5)
    config = config_of(corpus, tmp_path / "store", vocabulary_size=300)
    prepare(config)
    (corpus / "new.txt").write_text("one more")
    with pytest.raises(StoreError, match=r"5 files that have changed since \(now 6\)"):
        check_prepare(config)
    shutil.rmtree(corpus)
    assert prepare(config).reused


def test_bad_input_writes_no_files(corpus, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("x")
    new = tmp_path / "new"
    for config, error, words in (
        (config_of(tmp_path / "missing", new), CorpusError, "missing does not exist"),
        (config_of(corpus, new, suffixes=(".xyz",)), CorpusError, r"\.xyz"),
        (
            config_of(corpus, new, vocabulary_size=30_000),
            TokenizerError,
            "more than the text supports",
        ),
        (config_of(corpus, tmp_path / "file"), StoreError, "is a file"),
        (config_of(corpus, tmp_path / "other", overwrite=True), StoreError, "has other files"),
    ):
        with pytest.raises(error, match=words):
            prepare(config)
    assert sorted(contents(tmp_path)) == ["file", "other/thesis.txt"]
    assert sorted(os.listdir(tmp_path)) == ["file", "other"]


def test_unwritable_parent_is_refused(corpus, tmp_path, monkeypatch):
    allowed = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: not (mode & os.W_OK) and allowed(path, mode)
    )
    with pytest.raises(StoreError, match="no permission"):
        check_prepare(config_of(corpus, tmp_path / "a" / "b"))
    assert not os.listdir(tmp_path)


def test_interrupt_leaves_no_output(corpus, tmp_path):
    def stop(line):
        if line.startswith("tokenized"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config_of(corpus, tmp_path / "store"), progress=stop)
    assert os.listdir(tmp_path) == [".store.preparing"]


def test_output_of_faster_process_is_used(corpus, prepared, tmp_path):
    target = tmp_path / "store"

    def overtake(line):
        if line.startswith("tokenized") and not target.exists():
            shutil.copytree(prepared.folder, target)

    done = prepare(config_of(corpus, target), progress=overtake)
    assert done.manifest == prepared.manifest
    assert os.listdir(tmp_path) == ["store"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocabulary_size", 100),
        ("vocabulary_size", 8192.0),
        ("validation_fraction", 0.0),
        ("validation_fraction", 0.9),
        ("seed", -1),
        ("chunk_tokens", 1),
        ("tokenizer_characters", 0),
        ("undecodable", "ignore"),
        ("suffixes", ".txt"),
    ],
)
def test_bad_settings_are_refused(corpus, tmp_path, field, value):
    with pytest.raises(ValueError, match=field):
        config_of(corpus, tmp_path / "new", **{field: value})


def test_tokenizer_is_trained_on_bounded_sample(tmp_path):
    corpus = write_corpus(tmp_path / "text", documents=30)
    few = {"tokenizer_characters": 2000}
    whole, sample, again = (
        prepare(config_of(corpus, tmp_path / name, vocabulary_size=300, **changes)).manifest
        for name, changes in (("whole", {}), ("sample", few), ("again", few))
    )
    assert sample.tokenizer_fingerprint == again.tokenizer_fingerprint
    assert sample.tokenizer_fingerprint != whole.tokenizer_fingerprint
    config = config_of(corpus, tmp_path / "new", **few)
    builder = Builder(config=config, work=tmp_path, report=Reporter(say=print, bars=False))
    lines = list(builder.sample(builder.survey()))
    assert 1000 < sum(map(len, lines)) <= 2000
    read = [d.name for d in config.documents() if any(line in d.text for line in lines)]
    assert len(set(read)) > 10


@pytest.mark.parametrize("bars", [True, False])
def test_progress_leaves_no_thread(bars, monkeypatch):
    """A thread would turn off the checks that run in a forked process."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    before = threading.active_count()
    with Reporter(say=print, bars=bars).bar("reading", 100) as advance:
        advance(50)
    assert threading.active_count() == before


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def put_another_tokenizer(path):
    """Replace the tokenizer by a valid one. The manifest then matches the files, but not the
    tokens."""
    Tokenizer.train(["other words entirely " * 50], vocabulary_size=280).save(path.parent)
    dataclasses.replace(Manifest.read(path.parent), files=record_files(path.parent)).write(
        path.parent
    )


@pytest.mark.parametrize(
    "name",
    ["train/chunk-0-1.bin", "train/index.json", "validation/chunk-0-0.bin", "tokenizer.model"],
)
@pytest.mark.parametrize(
    ("damage", "words"),
    [(Path.unlink, "is missing"), (truncate, "bytes"), (flip, "sha256"), (Path.touch, None)],
)
def test_damaged_files_are_reported(prepared, store, name, damage, words):
    damage(store / name)
    if words is None:
        assert verify_store(store) == prepared.manifest
        return
    with pytest.raises(StoreError, match=f"{name}.*{words}"):
        verify_store(store)


def test_quick_verification_checks_only_sizes(store):
    chunk = store / "train" / "chunk-0-0.bin"
    flip(chunk)
    verify_store(store, hashes=False)
    truncate(chunk)
    with pytest.raises(StoreError, match=r"chunk-0-0\.bin"):
        verify_store(store, hashes=False)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda store: flip(store / "train" / "chunk-0-0.bin"), r"chunk-0-0\.bin"),
        (
            lambda store: with_manifest(store, format=2),
            r"format 2.*ptdp prepare --data.overwrite true",
        ),
    ],
    ids=["damaged", "older format"],
)
def test_unusable_folder_is_replaced_with_overwrite(corpus, prepared, store, damage, words):
    damage(store)
    with pytest.raises(StoreError, match=words):
        prepare(config_of(corpus, store))
    assert not prepare(config_of(corpus, store, overwrite=True)).reused
    assert contents(store) == contents(prepared.folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"format": 99}', "format 99, but this version reads format 3. Prepare the data again"),
        ('{"format": true}', "format True"),
        ('{"format": 2, "files": 3}', "format 2.*ptdp prepare"),
        ('{"format": 3, "files": 3}', "its sha256 differs"),
        ("[" * 100_000, "64 levels deep"),
    ],
)
def test_damaged_manifest_is_refused(tmp_path, text, words):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match=rf"manifest\.json.*{words}"):
        Manifest.read(tmp_path)


def test_changed_digit_in_manifest_is_detected(store):
    file = store / "manifest.json"
    text = file.read_text()
    digits = [place for place, letter in enumerate(text) if letter.isdigit()]
    for place in digits[:: len(digits) // 40]:
        file.write_text(f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}")
        with pytest.raises(StoreError, match=r"manifest\.json is"):
            Manifest.read(store)


@pytest.mark.parametrize("name", ["../secret", "train/../../secret", "{absolute}"])
def test_manifest_with_file_outside_folder_is_refused(store, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    record = vars(record_files(tmp_path)[secret.name])
    with_manifest(store, files={**listed(store), name.format(absolute=secret): record})
    with pytest.raises(
        StoreError, match=r"manifest\.json: .*secret' is not the name of a file inside"
    ):
        verify_store(store)


def test_link_in_prepared_folder_is_refused(store, tmp_path):
    chunk = store / "train" / "chunk-0-0.bin"
    chunk.rename(tmp_path / "elsewhere")
    chunk.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=r"chunk-0-0\.bin is a link"):
        verify_store(store)


@pytest.mark.parametrize("name", ["train/chunk-0-0.bin", "train/index.json", "tokenizer.json"])
def test_file_missing_from_manifest_is_refused(store, name):
    files = listed(store)
    del files[name]
    with_manifest(store, files=files)
    with pytest.raises(StoreError, match=f"{name} is not listed in manifest.json"):
        verify_store(store)


def test_replaced_tokenizer_or_missing_data_are_refused(store, tmp_path):
    put_another_tokenizer(store / "tokenizer.model")
    with pytest.raises(StoreError, match="the tokenizer was replaced"):
        verify_store(store)
    with pytest.raises(DataError, match=r"not a folder of prepared data.*ptdp prepare"):
        verify_store(tmp_path)
