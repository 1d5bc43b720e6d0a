"""Models, corpora, single files and exports under addresses of fsspec, in one process."""

import sys
import threading
from types import SimpleNamespace

import fsspec
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ptdp import LitCausalLM
from lightning_ptdp.base.requirements import RequirementError
from lightning_ptdp.callbacks import ExportHuggingFace, InitFrom, export_huggingface
from lightning_ptdp.checkpoint import (
    CheckpointError,
    MissingCheckpointError,
    read_full,
    remote_path,
)
from lightning_ptdp.checkpoint.local_copies import local_copy
from lightning_ptdp.checkpoint.remote_path import located
from lightning_ptdp.cli import main
from lightning_ptdp.data import PrepareConfig, TextDataModule, prepare
from lightning_ptdp.exchange import convert
from lightning_ptdp.models.pretrained_config import config_values
from lightning_ptdp.models.tiny import make_tiny
from lightning_ptdp.strategy import PTDPStrategy
from tests.folders import read_huggingface
from tests.parity import make_trainer

MODEL = "memory://store/model"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """Yield an empty store, with an empty folder for copies."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return the folder of a small model."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(folder, num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    return folder


@pytest.fixture
def fetched(monkeypatch):
    """Return the addresses that are fetched."""
    call, urls = remote_path._call, []

    def noted(url, method, *arguments, **options):
        if method == "cat_file":
            urls.append(url)
        return call(url, method, *arguments, **options)

    monkeypatch.setattr(remote_path, "_call", noted)
    return urls


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_model_trains_from_an_address_and_is_exported_to_another(store, tiny, fetched):
    store.put(str(tiny), MODEL, recursive=True)
    assert config_values(MODEL)["num_hidden_layers"] == 1
    assert fetched == [f"{MODEL}/config.json"]
    ids = torch.randint(100, (4, 8), generator=torch.Generator().manual_seed(0))
    batches = DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)
    exported = "memory://store/out"
    found = {}
    for path in (str(tiny), MODEL):
        export = ExportHuggingFace(exported)
        trainer = make_trainer(PTDPStrategy(), max_steps=2, callbacks=[export])
        trainer.fit(LitCausalLM(path), batches)
        found[path] = {
            name: value.clone() for name, value in read_huggingface(local_copy(exported)).items()
        }
    for name, value in found[str(tiny)].items():
        assert torch.equal(value, found[MODEL][name])
    assert any(
        not torch.equal(value, found[MODEL][n]) for n, value in read_huggingface(tiny).items()
    )
    trainer = make_trainer(PTDPStrategy(), max_steps=0, callbacks=[InitFrom(exported)])
    trainer.fit(module := LitCausalLM(MODEL, pretrained=False), batches)
    for name, value in module.model.state_dict().items():
        assert torch.equal(value, found[MODEL][name])


def test_copy_is_made_once_and_again_when_the_source_changes(store, tiny, fetched, monkeypatch):
    monkeypatch.setattr("lightning_ptdp.checkpoint.local_copies._PIECE", 1 << 14)
    store.put(str(tiny), MODEL, recursive=True)
    copies = []
    threads = [threading.Thread(target=lambda: copies.append(local_copy(MODEL))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert copies[0] == copies[1]
    assert _files(copies[0]) == _files(tiny)
    pieces = [-(-path.stat().st_size // (1 << 14)) for path in tiny.iterdir()]
    assert len(fetched) == sum(pieces)
    assert local_copy(MODEL) == copies[0]
    assert len(fetched) == sum(pieces)
    store.pipe_file(f"{MODEL}/config.json", b"{}")
    assert (local_copy(MODEL) / "config.json").read_bytes() == b"{}"
    assert [path.name for path in copies[0].parent.iterdir()] == ["model"]


@pytest.mark.parametrize("kind", ["error", "short", "escape"])
def test_failed_fetch_leaves_no_copy(store, tmp_path, kind, monkeypatch):
    name = "../../escaped" if kind == "escape" else "a.txt"
    store.store[f"/store/model/{name}"] = fsspec.implementations.memory.MemoryFile(data=b"text")
    words = {"error": "a.txt failed: denied", "short": "changed while", "escape": "not the name of"}
    call = remote_path._call

    def fail(url, method, *arguments, **options):
        if method == "cat_file" and kind == "error":
            raise PermissionError("denied")
        return b"" if method == "cat_file" else call(url, method, *arguments, **options)

    monkeypatch.setattr(remote_path, "_call", fail)
    with pytest.raises(CheckpointError, match=words[kind]):
        local_copy(MODEL)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_single_files_and_folders_convert_between_addresses(store, tiny):
    convert(tiny, f"{MODEL}.ckpt", names="hf", prefix="")
    convert(f"{MODEL}.ckpt", f"{MODEL}.pt")
    convert(f"{MODEL}.pt", "memory://store/other.ckpt")
    expected = read_full(f"{MODEL}.ckpt")
    for name, value in read_full("memory://store/other.ckpt").items():
        assert torch.equal(value, expected[name])
    store.put(str(tiny), "/store/tiny", recursive=True)
    config = "memory://store/tiny/config.json"
    convert("memory://store/other.ckpt", MODEL, config=config, shard_bytes=8192)
    assert len([path for path in located(MODEL).iterdir() if path.suffix == ".safetensors"]) > 1
    convert("memory://store/other.ckpt", MODEL, config=config)
    assert read_huggingface(local_copy(MODEL)).keys() == read_huggingface(tiny).keys()
    assert not (located(MODEL) / "model.safetensors.index.json").exists()
    located("memory://store/thesis/a.tex").write_bytes(b"years of work")
    with pytest.raises(CheckpointError, match="is a folder with other content"):
        convert("memory://store/other.ckpt", "memory://store/thesis", to="huggingface")


def test_single_file_never_replaces_the_objects_of_a_folder(store, tiny):
    convert(tiny, f"{MODEL}.ckpt", names="hf", prefix="")
    runs = located("memory://store/runs.pt")
    (runs / "a.tex").write_bytes(b"years of work")
    with pytest.raises(CheckpointError, match=r"runs\.pt is a folder. Give the path of the file"):
        convert(f"{MODEL}.ckpt", runs)
    assert (runs / "a.tex").read_bytes() == b"years of work"


def test_failed_upload_of_a_single_file_keeps_the_earlier_one(store, tiny, monkeypatch):
    convert(tiny, f"{MODEL}.ckpt", names="hf", prefix="")
    target = located(f"{MODEL}.pt")
    target.write_bytes(b"earlier")
    call = remote_path._call

    def fail(url, method, *arguments, **options):
        if method == "pipe_file":
            raise PermissionError("read-only")
        return call(url, method, *arguments, **options)

    monkeypatch.setattr(remote_path, "_call", fail)
    with pytest.raises(CheckpointError, match="read-only"):
        convert(f"{MODEL}.ckpt", target)
    assert target.read_bytes() == b"earlier"


def test_corpus_and_prepared_folder_are_read_from_addresses(store, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number:02}.txt").write_text(f"the quick brown fox number {number} jumps\n" * 40)
    (text / "weights.bin").write_bytes(b"not text")
    store.put(str(text), "/store/text", recursive=True)
    options = {"vocabulary_size": 300, "validation_fraction": 0.1}
    here = prepare(PrepareConfig(source=str(text), output=str(tmp_path / "here"), **options))
    away = prepare(
        PrepareConfig(source="memory://store/text", output=str(tmp_path / "away"), **options)
    )
    assert away.manifest.splits == here.manifest.splits
    assert away.manifest.corpus.content == here.manifest.corpus.content
    store.put(str(tmp_path / "away"), "/store/tokens", recursive=True)

    def data(remote):
        folder = str(tmp_path / "copy")
        return TextDataModule(
            data_dir=folder, remote=remote, vocabulary_size=300, sequence_length=8
        )

    with pytest.raises(MissingCheckpointError, match=r"absent/manifest\.json does not exist"):
        data("memory://store/absent").check()
    data("memory://store/tokens").check()
    data("memory://store/tokens").prepare_data()
    data("memory://store/tokens").check()
    with pytest.raises(MissingCheckpointError, match=r"memory://store/absent does not exist"):
        PrepareConfig(source="memory://store/absent", output=str(tmp_path / "x")).files()


def test_export_at_an_address_is_logged_from_a_copy_that_is_removed(store, monkeypatch):
    store.pipe_file(f"{MODEL}/config.json", b"{}")
    logged = []

    def log_folder(folder, **_):
        assert (folder / "config.json").read_bytes() == b"{}"
        logged.append(folder)
        return "load"

    monkeypatch.setattr(export_huggingface, "log_folder", log_folder)
    logger = SimpleNamespace(tracking_uri="", run_id="")
    export_huggingface._log(logger, located(MODEL))
    assert not logged[0].exists()
    export_huggingface._log(logger, local_copy(MODEL))
    assert logged[1].exists()


@pytest.mark.parametrize("url", ["gs://bucket/model", "nosuch://bucket/model"])
def test_address_without_its_library_is_refused(url, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "gs", raising=False)
    for action in (local_copy, config_values, LitCausalLM.configure_model):
        argument = LitCausalLM(url) if action is LitCausalLM.configure_model else url
        with pytest.raises(RequirementError, match=r"lightning-ptdp\[gs\]|Copy the file"):
            action(argument)
    assert main(["convert", url, str(tmp_path / "x.ckpt")]) == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1


def test_hub_addresses_are_those_of_huggingface_hub():
    from huggingface_hub import HfFileSystem

    assert located("hf://org/model@main") == remote_path.RemotePath("hf://org/model@main")
    assert fsspec.get_filesystem_class("hf") is HfFileSystem
