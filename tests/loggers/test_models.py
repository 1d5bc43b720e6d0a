"""Exported models that MLflow loads."""

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.callbacks import ExportHuggingFace, LayoutSummary
from lightning_ptdp.loggers import MLFlowLogger
from lightning_ptdp.models import LitCausalLM
from lightning_ptdp.models.tiny import make_tiny
from tests.folders import read_huggingface

pytestmark = pytest.mark.thorough


def fit(folder, logger, *, tensor=2):
    """Train a step and export to ``folder / "out"``, which is logged."""
    ids = torch.arange(4 * 9).view(4, 9)
    rows = [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]
    trainer = L.Trainer(
        strategy=PTDPStrategy(tensor_parallel_size=tensor, start_method="fork"),
        accelerator="cpu",
        devices=tensor,
        max_steps=1,
        logger=logger,
        callbacks=[LayoutSummary(), ExportHuggingFace(folder / "out", log_model=True)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitCausalLM(str(folder / "model")), DataLoader(rows, batch_size=2))


def test_mlflow_loads_model_of_training_run(tmp_path):
    make_tiny(tmp_path / "model", vocabulary_size=400, num_hidden_layers=2)
    with pytest.raises(ValueError, match="log_model=True needs an MLFlowLogger"):
        fit(tmp_path, CSVLogger(tmp_path), tensor=1)
    assert not (tmp_path / "out").exists()
    logger = MLFlowLogger(save_dir=str(tmp_path / "runs"))
    fit(tmp_path, logger)
    import mlflow

    mlflow.set_tracking_uri(logger.tracking_uri)
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.note.content"].startswith("lightning-ptdp\n\n```text\n")
    assert "tensor 2 x pipeline 1" in run.data.tags["mlflow.note.content"]
    pipeline = mlflow.transformers.load_model(f"runs:/{run.info.run_id}/model", device="cpu")
    exported = read_huggingface(tmp_path / "out")
    loaded = pipeline.model.state_dict()
    assert loaded.keys() == exported.keys()
    assert all(torch.equal(loaded[name], exported[name]) for name in exported)
    assert pipeline("def", max_new_tokens=2)[0]["generated_text"].startswith("def")
