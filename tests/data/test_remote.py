"""Prepared folders copied from a mounted store."""

import hashlib
import json
import os
import shutil

import pytest

from lightning_ptdp.data import PrepareConfig, StoreError, TextDataModule
from lightning_ptdp.data.chat_build import ChatConfig
from lightning_ptdp.data.datamodule import fetch
from tests.data.folders import contents, flip, listed, with_manifest


def test_copy_equals_folder_and_is_made_once(prepared, tmp_path):
    manifest = fetch(f"local:{prepared.folder}", tmp_path / "deep" / "copy")
    assert manifest == prepared.manifest
    assert contents(tmp_path / "deep" / "copy") == contents(prepared.folder)
    assert os.listdir(tmp_path / "deep") == ["copy"]
    assert fetch("local:/nowhere", tmp_path / "deep" / "copy") == prepared.manifest


def test_missing_or_damaged_file_is_reported_and_rest_is_kept(store, tmp_path):
    chunk = store / "train" / "chunk-0-1.bin"
    data = chunk.read_bytes()
    chunk.unlink()
    with pytest.raises(
        StoreError, match=r"store/train/chunk-0-1\.bin cannot be fetched: FileNotFoundError"
    ):
        fetch(f"local:{store}", tmp_path / "copy")
    kept = tmp_path / ".copy.preparing" / "store" / "train" / "chunk-0-0.bin"
    time = kept.stat().st_mtime_ns
    chunk.write_bytes(data)
    fetch(f"local:{store}", tmp_path / "copy")
    assert (tmp_path / "copy" / "train" / "chunk-0-0.bin").stat().st_mtime_ns == time
    flip(chunk)
    with pytest.raises(StoreError, match=r"chunk-0-1\.bin is damaged"):
        fetch(f"local:{store}", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(StoreError, match=r"nowhere/manifest\.json cannot be fetched"):
        fetch(f"local:{tmp_path}/nowhere", tmp_path / "new")


def test_damaged_copy_is_not_kept(prepared, store, tmp_path):
    chunk = store / "train" / "chunk-0-0.bin"
    whole = chunk.read_bytes()
    flip(chunk)
    with pytest.raises(StoreError, match="is damaged"):
        fetch(f"local:{store}", tmp_path / "copy")
    chunk.write_bytes(whole)
    assert fetch(f"local:{store}", tmp_path / "copy") == prepared.manifest


@pytest.mark.parametrize(
    "name", ["../../escaped", "train/../../../escaped", "{absolute}", "..", "a/./b", "local:x"]
)
def test_copy_writes_no_file_outside_its_folder(prepared, tmp_path, name):
    store = tmp_path / "deep" / "store"
    shutil.copytree(prepared.folder, store)
    payload = tmp_path / "deep" / "payload"
    payload.write_text("payload")
    name = name.format(absolute=tmp_path / "escaped")
    record = {"size": 7, "sha256": hashlib.sha256(b"payload").hexdigest()}
    with_manifest(store, files={name: record, **listed(store)})
    (store / "escaped").write_text("payload")
    before = contents(tmp_path)
    (tmp_path / "user").mkdir()
    with pytest.raises(
        StoreError,
        match=r"manifest\.json: .* is not the name of a file inside the folder",
    ):
        fetch(f"local:{store}", tmp_path / "user" / "copy")
    assert os.listdir(tmp_path / "user") == [".copy.preparing"]
    shutil.rmtree(tmp_path / "user")
    assert contents(tmp_path) == before


def test_link_or_pipe_in_store_is_refused(store, tmp_path):
    chunk = store / "train" / "chunk-0-0.bin"
    chunk.rename(tmp_path / "elsewhere")
    chunk.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=r"chunk-0-0\.bin cannot be fetched.*is a link"):
        fetch(f"local:{store}", tmp_path / "copy")
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(
        StoreError, match=r"chunk-0-0\.bin cannot be fetched.*it is not a regular file"
    ):
        fetch(f"local:{store}", tmp_path / "copy")


def test_file_with_wrong_hash_is_not_kept(prepared, store, tmp_path):
    flip(store / "train" / "chunk-0-1.bin")
    with pytest.raises(StoreError, match=r"store/train/chunk-0-1\.bin is damaged"):
        fetch(f"local:{store}", tmp_path / "copy")
    work = tmp_path / ".copy.preparing" / "store"
    assert (work / "train" / "chunk-0-0.bin").exists()
    assert not (work / "train" / "chunk-0-1.bin").exists()
    # A file damaged after its download is also replaced, because its hash is checked again.
    flip(work / "train" / "chunk-0-0.bin")
    flip(store / "train" / "chunk-0-1.bin")
    fetch(f"local:{store}", tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(prepared.folder)


def test_data_module_copies_instead_of_preparing(prepared, tmp_path):
    data = TextDataModule(
        remote=f"local:{prepared.folder}",
        data_dir=str(tmp_path / "copy"),
        vocabulary_size=320,
        sequence_length=32,
    )
    data.check()
    assert not os.listdir(tmp_path)
    data.prepare_data()
    data.setup()
    data.check()
    assert json.loads((tmp_path / "copy" / "manifest.json").read_text())["vocabulary_size"] == 320
    assert len(data.train_dataloader()) > 0


@pytest.mark.parametrize("config", [PrepareConfig, ChatConfig])
def test_url_as_output_is_refused(config):
    with pytest.raises(ValueError, match=r"output='s3://bucket/tokens' is a URL.*remote"):
        config(output="s3://bucket/tokens")
