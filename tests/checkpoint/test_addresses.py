"""Checkpoints under addresses of fsspec, with a store in the memory of one process."""

import contextlib
import json
import re
import sys
import threading
import time

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from packaging.specifiers import SpecifierSet

from lightning_ptdp.base import requirements
from lightning_ptdp.checkpoint import (
    CheckpointError,
    MissingCheckpointError,
    choose_checkpoint,
    complete_checkpoints,
    data_files,
    newest_checkpoint,
    read_full,
    read_metadata,
    read_state,
    remote_path,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_ptdp.checkpoint.files import discard
from lightning_ptdp.checkpoint.remote_path import RemotePath, located
from lightning_ptdp.checkpoint.save_agreement import StorageError
from lightning_ptdp.strategy import PTDPStrategy
from tests.checkpoint import layouts
from tests.checkpoint.interruption import UNLIMITED, Killed, save, step_of
from tests.parity import make_trainer
from tests.tiny_gpt import LitTiny, Run

ROOT = "memory://runs"
LAST = RemotePath(f"{ROOT}/last.ckpt")


@pytest.fixture(autouse=True)
def store():
    """Return an empty store."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def _saves(address):
    return sorted(entry.name for entry in address.iterdir() if entry.name.startswith("save-"))


def _save(path, step):
    save(path, step)


@contextlib.contextmanager
def _cut(number, *, behind):
    """Kill the process, as far as it can see, at the request of this number."""
    requests = []
    call = remote_path._call

    def cut(url, method, *arguments, **options):
        requests.append(f"{method} {url}")
        if len(requests) > number:
            raise Killed
        if len(requests) == number and not behind:
            raise Killed
        result = call(url, method, *arguments, **options)
        if len(requests) == number:
            raise Killed
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_path, "_call", cut)
        patch.setattr(remote_path, "_AT_ONCE", 1)
        with contextlib.suppress(Killed):
            yield requests


@pytest.mark.parametrize(("name", "behind"), [("last.ckpt", False), ("other.ckpt", True)])
def test_killed_save_leaves_checkpoint_complete_or_absent(store, name, behind):
    target = RemotePath(f"{ROOT}/{name}")
    for number in range(1, UNLIMITED):
        store.store.clear()
        _save(LAST, 1)
        with _cut(number, behind=behind) as requests:
            _save(target, 2)
        was_cut = len(requests) >= number
        newest = newest_checkpoint(ROOT)
        assert newest is not None
        assert step_of(newest) in ((1, 2) if was_cut else (2,))
        assert choose_checkpoint(ROOT) == newest
        if name != "last.ckpt" and step_of(newest) == 1:
            with pytest.raises(CheckpointError, match=r"other\.ckpt (is not|does not exist)"):
                choose_checkpoint(target, on_damage="refuse")
        _save(target, 3)
        assert step_of(newest_checkpoint(ROOT)) == 3
        if not was_cut:
            assert number > 10
            return


def test_files_are_whole_before_metadata_and_earlier_save_is_removed_after_it(store):
    _save(LAST, 1)
    (first,) = _saves(LAST)
    with _cut(UNLIMITED, behind=False) as requests:
        _save(LAST, 2)
    changes = [request for request in requests if request.split()[0] in ("pipe_file", "rm")]
    assert changes[-2:] == [f"pipe_file {LAST}/metadata.json", f"rm {LAST}/{first}"]
    # What was sent is not read back.
    assert {name for name in requests if name.startswith("cat_file")} == {
        f"cat_file {LAST}/metadata.json"
    }
    assert len(_saves(LAST)) == 1


def test_abandoned_save_is_removed_after_a_day_and_a_recent_one_is_kept():
    now = int(time.time())
    old, recent = (f"save-{now - age:08x}-0123456789ab" for age in (90_000, 80_000))
    for name in (old, recent):
        (LAST / name / "rank0-0.safetensors").write_bytes(b"part")
    with pytest.raises(CheckpointError, match="is not a checkpoint, or is incomplete"):
        choose_checkpoint(LAST)
    assert complete_checkpoints(ROOT) == []
    _save(LAST, 1)
    assert recent in _saves(LAST)
    assert old not in _saves(LAST)


def test_two_writers_of_one_address_are_named(monkeypatch):
    write = data_files.write_rectangles

    def with_another_writer(*arguments, **options):
        monkeypatch.undo()
        _save(LAST, 7)
        return write(*arguments, **options)

    monkeypatch.setattr(data_files, "write_rectangles", with_another_writer)
    with pytest.raises(CheckpointError, match=r"last\.ckpt was saved by another process"):
        _save(LAST, 1)
    assert step_of(LAST) == 7
    assert len(_saves(LAST)) == 1


@pytest.mark.parametrize("suffix", [".safetensors", ".crc", "state.json", "index.json"])
def test_damage_and_missing_objects_are_named(store, suffix):
    _save(LAST, 1)
    _save(RemotePath(f"{ROOT}/newer.ckpt"), 2)
    (path,) = (name for name in store.store if "newer" in name and name.endswith(suffix))
    content = bytearray(store.cat_file(path))
    content[-1] ^= 1
    store.pipe_file(path, bytes(content))
    with pytest.raises(CheckpointError, match=rf"{suffix} is damaged"):
        verify_checkpoint(f"{ROOT}/newer.ckpt")
    if suffix == ".safetensors":
        with pytest.raises(CheckpointError, match=rf"{suffix} is damaged"):
            read_full(f"{ROOT}/newer.ckpt")
    store.rm_file(path)
    with pytest.raises(
        CheckpointError, match=rf"newer\.ckpt\S* is damaged: \S*{suffix} is missing"
    ):
        verify_checkpoint(f"{ROOT}/newer.ckpt")
    assert newest_checkpoint(ROOT) == LAST


def test_absent_address_is_named():
    with pytest.raises(MissingCheckpointError, match=r"memory://runs/last\.ckpt does not exist"):
        verify_checkpoint(LAST)
    (LAST / "thesis.tex").write_bytes(b"years of work")
    with pytest.raises(CheckpointError, match="is a folder with other content"):
        _save(LAST, 1)
    assert (LAST / "thesis.tex").read_bytes() == b"years of work"


def test_large_tensors_are_stored_as_several_objects(monkeypatch):
    monkeypatch.setattr(data_files, "_OBJECT_BYTES", 1 << 16)
    tensors = {
        "a": torch.randn(300, 300),
        "b": torch.randn(2, 30_000),
        "c": torch.tensor(3.0),
        "d": torch.empty(0),
    }
    layouts.save(LAST, tensors)
    names = [name for name in LAST.below() if name.endswith(".safetensors")]
    assert len(names) >= 8
    found = read_full(LAST)
    for name, value in tensors.items():
        assert torch.equal(found[name], value)


def test_copy_on_disk_is_the_same_checkpoint(store, tmp_path):
    _save(LAST, 4)
    store.get(str(LAST), str(tmp_path / "copy"), recursive=True)
    assert step_of(tmp_path / "copy") == 4
    folder = json.loads((tmp_path / "copy/metadata.json").read_text())["folder"]
    assert re.fullmatch("save-[0-9a-f]{8}-[0-9a-f]{12}", folder)


def test_discarding_does_not_match_names_as_patterns():
    paths = [RemotePath(f"{ROOT}/{name}/last.ckpt") for name in ("lr[1]", "lr1", "lr*")]
    for path in paths:
        save(path, 1)
    discard(paths[0])
    assert [path.exists() for path in paths] == [False, True, True]
    discard(paths[2])
    assert [path.exists() for path in paths] == [False, True, False]


def test_discarded_checkpoint_leaves_nothing(store):
    _save(LAST, 4)
    discard(LAST)
    assert not store.store


@pytest.mark.parametrize(
    ("error", "words", "tries"),
    [
        (ConnectionResetError("peer"), r"failed \(tries: \d\): peer", 3),
        (OSError(28, "no space left"), "no space left. Free space there", 1),
        (OSError(5, "XMinioStorageFull"), "XMinioStorageFull. Free space there", 1),
        (PermissionError("denied"), "denied. Check that the credentials", 1),
        (FileNotFoundError("no bucket"), "no bucket. Create the bucket", 1),
    ],
)
def test_failing_store_is_named_and_loses_no_checkpoint(monkeypatch, error, words, tries):
    _save(LAST, 1)
    call, failed = remote_path._call, []

    def fail(url, method, *arguments, **options):
        if url.endswith("index.json") and method == "pipe_file":
            failed.append(url)
            raise error
        return call(url, method, *arguments, **options)

    monkeypatch.setattr(remote_path, "_call", fail)
    monkeypatch.setattr(remote_path, "_PAUSE_S", 0.01)
    monkeypatch.setattr(remote_path, "_RETRY_S", 0.05)
    with pytest.raises(StorageError, match=rf"(?s)writing {LAST}/save-\S*/index\.json .*{words}"):
        _save(LAST, 2)
    assert len(failed) >= tries if tries > 1 else len(failed) == 1
    assert step_of(LAST) == 1
    assert len(_saves(LAST)) == 1


@pytest.mark.parametrize("arrives", [False, True])
def test_metadata_whose_answer_is_lost_leaves_one_whole_checkpoint(monkeypatch, arrives):
    _save(LAST, 1)
    call = remote_path._call

    def lose(url, method, *arguments, **options):
        if not url.endswith("metadata.json") or method != "pipe_file":
            return call(url, method, *arguments, **options)
        if arrives:
            call(url, method, *arguments, **options)
        raise ConnectionResetError("peer")

    monkeypatch.setattr(remote_path, "_call", lose)
    monkeypatch.setattr(remote_path, "_RETRY_S", 0.0)
    with pytest.raises(StorageError, match=r"metadata\.json failed"):
        _save(LAST, 2)
    assert step_of(LAST) == (2 if arrives else 1)


def test_unreachable_store_is_no_reason_for_an_older_checkpoint(monkeypatch):
    _save(LAST, 1)
    _save(RemotePath(f"{ROOT}/newer.ckpt"), 2)
    call = remote_path._call

    def fail(url, method, *arguments, **options):
        if "newer" in url and method == "cat_file":
            raise PermissionError("denied")
        return call(url, method, *arguments, **options)

    monkeypatch.setattr(remote_path, "_call", fail)
    for find in (newest_checkpoint, choose_checkpoint, complete_checkpoints):
        with pytest.raises(StorageError, match=r"newer\.ckpt/metadata\.json failed: denied"):
            find(ROOT)


@pytest.mark.parametrize("url", ["s3://key:hidden@bucket/x", "sftp://me:hidden@host/x"])
def test_credentials_in_an_address_are_refused_unseen(url):
    for action in (located, verify_checkpoint, newest_checkpoint):
        with pytest.raises(CheckpointError, match=r"://\*\*\*@.*contains credentials") as refused:
            action(url)
        assert "hidden" not in str(refused.value)
    with pytest.raises(CheckpointError, match="contains credentials"):
        save_checkpoint(url, tensors={}, state={}, metadata={})
    assert located("memory://me@host/x") == RemotePath("memory://me@host/x")


@pytest.mark.parametrize(("format", "is_file"), [("auto", True), ("folder", False)])
def test_one_process_trains_and_resumes_under_an_address(store, format, is_file, caplog):
    def fit(steps, **options):
        run = Run(layers=2, steps=steps)
        trainer = make_trainer(
            PTDPStrategy(checkpoint_format=format),
            default_root_dir=ROOT,
            max_steps=steps,
            callbacks=[ModelCheckpoint(save_last=True), *options.pop("callbacks", ())],
        )
        trainer.fit(run.make_module(), run.make_loaders(trainer)[0], **options)
        return trainer

    last = f"{ROOT}/checkpoints/last.ckpt"
    first = fit(2)
    assert RemotePath(last).is_file() == is_file
    weights = first.strategy.gather_state_dict()
    loaded = LitTiny.load_from_checkpoint(last, run=Run(layers=2, steps=1))
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, weights[name])
    assert fit(3, ckpt_path="last").global_step == 3
    assert fit(4, ckpt_path=last).global_step == 4
    hidden = f"memory://me:hidden@{last.partition('://')[2]}"
    with pytest.raises(CheckpointError, match="contains credentials"):
        fit(5, ckpt_path=hidden)
    with pytest.raises(MissingCheckpointError, match=r"memory://runs/absent\.ckpt does not exist"):
        fit(5, ckpt_path=f"{ROOT}/absent.ckpt")
    assert "hidden" not in caplog.text


def test_missing_library_names_the_extra(monkeypatch):
    s3fs = requirements.Declared(name="s3fs", versions=SpecifierSet(">=2024.6"), extra="s3")
    monkeypatch.setattr(requirements, "_declared", lambda: (s3fs,))
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(
        requirements.RequirementError, match=r"Run: pip install 'lightning-ptdp\[s3\]'"
    ):
        located("s3://bucket/x")


def test_limit_of_whole_objects_grows_with_their_size(monkeypatch):
    save(LAST, 1)
    entry = read_metadata(LAST).files["state.json"]
    call = remote_path._call

    def slow(url, method, *arguments, **options):
        if method == "cat_file":
            time.sleep(0.2)
        return call(url, method, *arguments, **options)

    monkeypatch.setattr(remote_path, "_call", slow)
    monkeypatch.setattr(remote_path, "_CALL_S", 0.1)
    monkeypatch.setattr(remote_path, "_RETRY_S", 0.0)
    monkeypatch.setattr(remote_path, "_BYTES_PER_S", entry.size)
    assert read_state(LAST) is not None


def test_request_without_an_answer_is_abandoned_at_its_limit(monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(remote_path, "_call", lambda *_, **__: answers.wait(60))
    monkeypatch.setattr(remote_path, "_CALL_S", 0.05)
    monkeypatch.setattr(remote_path, "_RETRY_S", 0.0)
    try:
        with pytest.raises(
            StorageError, match=r"reading \S+ failed \(tries: 1\): TimeoutError, no"
        ):
            LAST.exists()
    finally:
        answers.set()
