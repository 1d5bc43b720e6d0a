"""Loggers with ``log_model`` copy complete checkpoint folders to their store."""

import sys
import time
import types
from pathlib import Path

import lightning.pytorch as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger as LightningMLFlowLogger
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers import wandb as wandb_module
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_ptdp.checkpoint import verify_checkpoint
from lightning_ptdp.loggers import MLFlowLogger, mlflow
from tests.conformance.toys import LitNet, Place, loader, make_trainer
from tests.pool import Pool

pytestmark = pytest.mark.thorough


def train(rank, path, make_logger, log_model):
    L.seed_everything(1, verbose=False)
    logger = make_logger(path, log_model)
    saver = ModelCheckpoint(
        dirpath=Path(path, "checkpoints"), filename="{epoch}", save_top_k=-1, save_last=True
    )
    trainer = make_trainer(
        Place(layout={"checkpoint_format": "folder"}),
        logger=logger,
        callbacks=[saver],
        enable_checkpointing=True,
    )
    trainer.fit(LitNet(), loader())
    return getattr(logger, "run_id", None) or logger.experiment.uploaded


def lightnings(path, log_model):
    uri, files = f"sqlite:///{path}/mlflow.db", Path(path, "artifacts").as_uri()
    return LightningMLFlowLogger(tracking_uri=uri, artifact_location=files, log_model=log_model)


def ours(path, log_model):
    return MLFlowLogger(save_dir=path, log_model=log_model)


@pytest.mark.parametrize("make_logger", [lightnings, ours])
@pytest.mark.parametrize("log_model", [True, "all"])
def test_mlflow_copies_checkpoint_folders(make_logger, log_model, pool, tmp_path):
    (run_id,) = pool.run(train, world_size=1, args=(str(tmp_path), make_logger, log_model))
    found = sorted((tmp_path / "artifacts").rglob("metadata.json"))
    assert [file.parent.name for file in found] == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    for file in found:
        assert run_id in file.parts
        verify_checkpoint(file.parent)


def test_last_checkpoint_may_take_longer_than_other_requests(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    def slow(client, run_id, path, artifact_path):
        time.sleep(2.0)
        uploaded.append(path)

    uploaded = []
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    monkeypatch.setattr(mlflow, "LIMIT_S", 0.5)
    monkeypatch.setattr(MlflowClient, "log_artifact", slow)
    checkpoint = tmp_path / "last.ckpt"
    checkpoint.touch()
    saver = ModelCheckpoint(dirpath=tmp_path)
    saver.last_model_path = str(checkpoint)
    logger = MLFlowLogger(save_dir=str(tmp_path), log_model=True)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.after_save_checkpoint(saver)
    logger.finalize("success")
    run = MlflowClient(logger.tracking_uri).get_run(logger.run_id)
    assert (run.info.status, run.data.metrics["loss"]) == ("FINISHED", 1.0)
    assert uploaded == [str(checkpoint)]


class Run:
    """Stand-in for a W&B run that records uploads."""

    id = "7"

    def __init__(self):
        self.uploaded = []

    def log_artifact(self, artifact, aliases):
        self.uploaded.append((artifact.files, artifact.folders, aliases))

    def __getattr__(self, name):
        return lambda *_, **__: None


class Artifact:
    """Stand-in for a W&B artifact, which has separate methods for files and folders."""

    def __init__(self, **_):
        self.files = []
        self.folders = []

    def add_file(self, local_path, name=None, is_tmp=False, policy=None):
        if not Path(local_path).is_file():
            raise ValueError(f"Path is not a file: {local_path!r}")
        self.files.append(f"{name}: {Path(local_path).name}")

    def add_dir(self, local_path, name=None, policy=None):
        verify_checkpoint(local_path)
        self.folders.append(f"{name}: {Path(local_path).name}")


def wandbs(path, log_model):
    contents = {
        "wandb": {"Artifact": Artifact, "run": None},
        "wandb.sdk": {},
        "wandb.sdk.lib": {"RunDisabled": Run},
        "wandb.wandb_run": {"Run": Run},
    }
    for name, content in contents.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
    wandb_module._WANDB_AVAILABLE = True
    return WandbLogger(save_dir=path, log_model=log_model, experiment=Run())


@pytest.mark.parametrize("log_model", [True, "all"])
def test_wandb_copies_checkpoint_folders(log_model, tmp_path):
    pool = Pool()  # the fake modules stay imported in its processes
    try:
        (uploaded,) = pool.run(train, world_size=1, args=(str(tmp_path), wandbs, log_model))
    finally:
        pool.close()
    folders = [name for _, folders, _ in uploaded for name in folders]
    assert sorted(set(folders)) == [
        "model.ckpt: epoch=0.ckpt",
        "model.ckpt: epoch=1.ckpt",
        "model.ckpt: last.ckpt",
    ]
    assert not any(files for files, _, _ in uploaded)
    assert any("best" in aliases for _, _, aliases in uploaded)
