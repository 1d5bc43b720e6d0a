"""Every installable Lightning logger with every callback that logs."""

import json
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CometLogger, CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers import MLFlowLogger as LightningMLFlowLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from lightning_ptdp import PTDPStrategy, Sampling
from lightning_ptdp.callbacks import (
    LayoutSummary,
    LogDatasets,
    RunReport,
    SaveResolvedConfig,
    Throughput,
    WriteSamples,
)
from lightning_ptdp.loggers import MLFlowLogger
from lightning_ptdp.loggers.tracking_store import sqlite_uri
from lightning_ptdp.models import LitCausalLM
from lightning_ptdp.models.tiny import make_tiny

pytestmark = pytest.mark.thorough

CONFIG = "seed_everything: 1\ntrainer:\n  max_steps: 2\n  callbacks: []\n  strategy: ptdp\n"


class Other(DummyLogger):
    """User logger whose methods have the names of ours but other arguments."""

    @property
    def version(self):
        return "other"

    def log_text(self, key, columns):
        raise AssertionError("called")

    log_table = log_tags = log_dataset = check = log_text


LOGGERS = {
    "csv": lambda folder: CSVLogger(folder),
    "tensorboard": lambda folder: TensorBoardLogger(folder),
    "wandb": lambda folder: WandbLogger(save_dir=folder, offline=True),
    "comet": lambda folder: CometLogger(online=False, offline_directory=str(folder)),
    "mlflow": lambda folder: MLFlowLogger(tracking_uri=sqlite_uri(folder / "mlflow.db")),
    "lightning's mlflow": lambda folder: LightningMLFlowLogger(
        tracking_uri=sqlite_uri(folder / "mlflow.db"), artifact_location=str(folder / "artifacts")
    ),
    "other": lambda folder: Other(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model"
    make_tiny(path)
    return path


@pytest.mark.parametrize("name", LOGGERS)
def test_logger_accepts_output_of_all_callbacks(name, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    logger = LOGGERS[name](tmp_path)
    parameters = []
    log = logger.log_hyperparams
    monkeypatch.setattr(
        logger,
        "log_hyperparams",
        lambda params, *rest: (parameters.append(params), log(params, *rest))[1],
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=PTDPStrategy(),
        default_root_dir=tmp_path,
        max_steps=2,
        limit_val_batches=1,
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            SaveResolvedConfig(CONFIG),
            LayoutSummary(),
            LogDatasets(),
            RunReport(),
            Throughput(),
            WriteSamples(["a |\nb"], Sampling(temperature=0.0, max_new_tokens=2)),
        ],
    )
    ids = torch.arange(12).view(4, 3)
    loader = DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)
    trainer.fit(LitCausalLM(str(folder)), loader, loader)
    assert {"seed_everything": 1, "trainer": {"max_steps": 2}, "strategy": "ptdp"} in parameters
    if "mlflow" in name:
        from mlflow import MlflowClient, artifacts

        run = MlflowClient(sqlite_uri(tmp_path / "mlflow.db")).get_run(str(logger.run_id))
        kept = Path(
            artifacts.download_artifacts(
                run_id=run.info.run_id, tracking_uri=sqlite_uri(tmp_path / "mlflow.db")
            )
        )
        assert (kept / "config.yaml").read_text() == CONFIG
        assert (run.data.tags["layout"], run.data.tags["num_microbatches"]) == ("t1 p1 d1", "1")
        assert json.loads((kept / "samples.json").read_text())["columns"] == [
            "step",
            "prompt",
            "text",
        ]
    if name == "wandb":
        import wandb

        assert logger.experiment.summary["samples"]["nrows"] == 1
        wandb.finish()
