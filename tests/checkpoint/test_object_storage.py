"""Checkpoints in object storage: an S3 server that fails when told to, and Google's emulator."""

import gc
import os
import signal
import time
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_ptdp import LitCausalLM
from lightning_ptdp.callbacks import ExportHuggingFace
from lightning_ptdp.checkpoint import (
    CheckpointError,
    TensorReader,
    complete_checkpoints,
    newest_checkpoint,
    remote_path,
    verify_checkpoint,
)
from lightning_ptdp.checkpoint.save_agreement import StorageError
from lightning_ptdp.cli import main
from lightning_ptdp.models.tiny import make_tiny
from lightning_ptdp.parameters.rectangle import Rectangle
from lightning_ptdp.strategy import PTDPStrategy
from tests.checkpoint import google_server, layouts
from tests.checkpoint.s3_server import SECRET, SETTINGS, serving
from tests.folders import read_huggingface
from tests.parity import make_trainer
from tests.tiny_gpt import Run

pytestmark = pytest.mark.thorough

ROOT = "s3://bucket"
LAST = "checkpoints/last.ckpt"
ONE = {}
T2 = {"tensor_parallel_size": 2}
P2 = {"pipeline_parallel_size": 2, "num_microbatches": 2}
D2 = {"shard": "optimizer", "async_save": True}
SHORT_S = 60  # of a wait that should end within seconds, on a busy machine


@pytest.fixture(scope="module")
def server():
    with serving() as served:
        yield served


@pytest.fixture
def quick(monkeypatch):
    """Let requests have short limits."""
    for name, value in (("_CALL_S", 4.0), ("_RETRY_S", 4.5), ("_PAUSE_S", 0.1)):
        monkeypatch.setattr(remote_path, name, value)


@pytest.fixture(params=["s3", "gs"])
def bucket(request):
    """Return the address of a bucket of each kind of store."""
    if request.param == "s3":
        request.getfixturevalue("server")
        yield ROOT
    else:
        with google_server.serving():
            yield f"gs://{google_server.BUCKET}"


def _environment():
    names = (*SETTINGS, google_server.SETTING)
    return {name: os.environ[name] for name in names if name in os.environ}


def _fit(rank, layout, world_size, root, steps, resume):
    run = Run(layers=2, steps=steps)
    strategy = PTDPStrategy(checkpoint_format="folder", **layout)
    saver = ModelCheckpoint(every_n_train_steps=2, save_top_k=1, save_last=True)
    trainer = make_trainer(
        strategy, world_size, max_steps=steps, default_root_dir=root, callbacks=[saver]
    )
    L.seed_everything(1)
    trainer.fit(run.make_module(), run.make_loaders(trainer)[0], ckpt_path=resume)
    return dict(trainer.strategy.gather_state_dict())


def _fits(pool, root, *runs):
    """Train in turn, two steps longer each time; return the weights after the last run."""
    found = None
    for number, (layout, world_size, resume) in enumerate(runs):
        arguments = (layout, world_size, root, 2 * number + 2, resume)
        found = pool.run(_fit, world_size=world_size, args=arguments, env=_environment())[0]
    return found


@pytest.fixture(scope="module")
def expected(pool, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("local"))
    return _fits(pool, root, (ONE, 1, None), *[(ONE, 1, f"{root}/{LAST}")] * 2)


def test_training_saves_and_resumes_under_an_address_in_any_layout(pool, bucket, expected):
    root = f"{bucket}/resumed"
    found = _fits(pool, root, (P2, 2, None), (D2, 2, "last"), (T2, 2, f"{root}/{LAST}"))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
    names = {path.name for path in complete_checkpoints(root, recursive=True)}
    assert names == {"last.ckpt", "epoch=0-step=6.ckpt"}  # of the best ones, one is kept
    files = remote_path.RemotePath(root).below()
    tensors = {Path(path).name for path in files if path.endswith(".safetensors")}
    assert {name.partition("-")[0] for name in tensors} == {"rank0", "rank1"}


@pytest.mark.parametrize("end", [b"", b"\r", b"\n", b"\r\n", b"\r\r", b"--"])
def test_object_is_stored_to_its_last_byte(bucket, end):
    path = remote_path.RemotePath(f"{bucket}/object")
    path.write_bytes(b"abc" + end)
    assert path.read_bytes() == b"abc" + end


def _train_model(rank, path, export):
    ids = torch.randint(100, (8, 8), generator=torch.Generator().manual_seed(0))
    batches = DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=4)
    trainer = make_trainer(
        PTDPStrategy(tensor_parallel_size=2), 2, max_steps=2, callbacks=[ExportHuggingFace(export)]
    )
    trainer.fit(LitCausalLM(path), batches)
    # Nodes share no disk: only rank 0 may touch the temporary folder, which is its own.
    trainer.strategy.num_nodes = 2
    trainer.strategy.export_huggingface(f"{export}-of-nodes")
    return dict(trainer.strategy.gather_state_dict())


def test_ranks_fetch_a_model_once_per_node_and_export_it_together(pool, server, tmp_path):
    from s3fs import S3FileSystem

    tiny = tmp_path / "tiny"
    make_tiny(tiny, num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    model, export = f"{ROOT}/models/tiny", f"{ROOT}/exports/tuned"
    for file in tiny.iterdir():
        (remote_path.RemotePath(model) / file.name).write_bytes(file.read_bytes())
    server.requests()
    env = {**_environment(), "HOME": str(tmp_path)}
    trained = pool.run(_train_model, world_size=2, args=(model, export), env=env)[0]
    fetched = [entry["path"] for entry in server.requests() if entry["method"] == "GET"]
    read = sorted(name for path in fetched if (name := path.partition("models/tiny/")[2]))
    assert read == sorted(path.name for path in tiny.iterdir())
    for folder in (export, f"{export}-of-nodes"):
        copy = tmp_path / "copy" / Path(folder).name
        S3FileSystem().get(folder, str(copy), recursive=True)
        exported = {f"model.{name}": value for name, value in read_huggingface(copy).items()}
        assert exported.keys() == trained.keys()
        assert all(torch.equal(value, trained[name]) for name, value in exported.items())
    assert {
        name.partition("/")[0] for name in remote_path.RemotePath(f"{ROOT}/exports").below()
    } == {
        "tuned",
        "tuned-of-nodes",
    }


def _save(path, step):
    layouts.save(path, {"w": torch.full((5,), float(step))}, metadata={"step": step})


def _step(path):
    return int(verify_checkpoint(str(path)).run["step"])


def test_save_killed_at_metadata_leaves_the_older_checkpoint(server):
    root = f"{ROOT}/killed"
    _save(f"{root}/one.ckpt", 1)
    server.requests()
    server.fail("PUT", r"two\.ckpt/metadata\.json", "hang", count=1)
    gc.collect()
    child = os.fork()  # a forked process must not use its parent's connections
    if not child:
        _save(f"{root}/two.ckpt", 2)
        os._exit(0)
    try:
        deadline = time.monotonic() + SHORT_S
        while not any(request["kind"] == "hang" for request in server.requests()):
            assert time.monotonic() < deadline, "the save did not reach its last object"
            time.sleep(0.05)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert newest_checkpoint(root) == remote_path.RemotePath(f"{root}/one.ckpt")
    with pytest.raises(CheckpointError, match=r"two\.ckpt is not a checkpoint, or is incomplete"):
        verify_checkpoint(f"{root}/two.ckpt")
    _save(f"{root}/two.ckpt", 3)
    assert _step(newest_checkpoint(root)) == 3


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("method", ["PUT", "GET"])
@pytest.mark.parametrize("kind", ["503 SlowDown", "reset", "hang"])
def test_failed_requests_are_repeated(server, method, kind):
    path = f"{ROOT}/repeated/{method}-{kind[:3]}.ckpt"
    server.fail(method, r"rank0-0\.safetensors", kind, count=1)
    _save(path, 4)
    assert _step(path) == 4
    assert [request["kind"] for request in server.requests()].count(kind) == 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("503 SlowDown", r" \(tries: \d+\): \S.*"),
        ("reset", r" \(tries: \d+\): \S.*"),
        ("hang", r" \(tries: \d+\): TimeoutError, no answer"),
        ("403 AccessDenied", ": .*Check that the credentials of fsspec's configuration"),
        ("507 XMinioStorageFull", ": .*Free space there, or give another address"),
    ],
)
def test_lasting_failures_are_named_within_the_limit(server, kind, words, capfd):
    path = f"{ROOT}/failing/last.ckpt"
    _save(path, 1)
    server.fail("PUT", r"failing.*state\.json", kind, count=10_000)
    began = time.monotonic()
    where = rf"writing {path}/save-\S*/state\.json failed"
    with pytest.raises(StorageError, match=where + words) as failed:
        _save(path, 2)
    assert time.monotonic() - began < SHORT_S
    server.fail("PUT", "nothing", kind, count=0)
    assert _step(path) == 1
    said = f"{failed.value}{failed.value.__cause__}{capfd.readouterr()}"
    assert SECRET not in said


def test_another_layout_fetches_only_the_bytes_that_it_needs(server):
    path, full = f"{ROOT}/ranges.ckpt", torch.randn(1024, 4096)
    layouts.save(path, {"w": full})
    for offset, shape in (((256, 0), (512, 4096)), ((0, 1024), (1024, 1024))):
        server.requests()
        found = TensorReader(path).read("model/w", offset=offset, shape=shape)
        fetched = sum(request["sent"] for request in server.requests())
        assert torch.equal(found, full[Rectangle.at(offset, shape).slices])
        assert found.nbytes < fetched <= 1.01 * found.nbytes


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [
        ("s3://missing/runs", "", "Create the bucket, or give another address"),
        (f"{ROOT}/forbidden", "403 AccessDenied", "Check that the credentials"),
    ],
)
def test_unusable_bucket_is_named_before_launch(server, url, kind, words):
    server.fail("PUT", "forbidden", kind, count=10_000)
    for layout, world_size in ((P2, 2), (ONE, 1)):
        trainer = make_trainer(
            PTDPStrategy(**layout), world_size, callbacks=[ModelCheckpoint(dirpath=url)]
        )
        run = Run(layers=2, steps=2)
        with pytest.raises(
            MisconfigurationException, match=rf"writing {url}/\S+ failed: .*{words}"
        ):
            trainer.fit(run.make_module(), DataLoader(run.make_data()))


def test_verbs_accept_addresses(server, tmp_path, capfd):
    _save(f"{ROOT}/verbs/one.ckpt", 1)
    assert main(["ckpt", "inspect", f"{ROOT}/verbs/one.ckpt"]) == 0
    assert main(["ckpt", "reshard", f"{ROOT}/verbs/one.ckpt", f"{ROOT}/verbs/two.ckpt"]) == 0
    assert main(["ckpt", "verify", f"{ROOT}/verbs/one.ckpt", f"{ROOT}/verbs/two.ckpt"]) == 0
    assert main(["convert", f"{ROOT}/verbs/two.ckpt", str(tmp_path / "out.pt")]) == 0
    assert torch.load(tmp_path / "out.pt")["w"].tolist() == [1.0] * 5
    assert main(["convert", str(tmp_path / "out.pt"), f"{ROOT}/verbs/three.ckpt"]) == 0
    assert main(["ckpt", "verify", f"{ROOT}/verbs/absent.ckpt"]) == 2
    said = capfd.readouterr()
    assert "s3://bucket/verbs/absent.ckpt does not exist" in said.err
    assert SECRET not in said.out + said.err
