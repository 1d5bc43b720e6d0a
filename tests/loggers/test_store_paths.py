"""Database files in folders with unusual names."""

import pytest

from lightning_ptdp.loggers import MLFlowLogger
from lightning_ptdp.loggers.tracking_store import sqlite_path, sqlite_uri

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("name", ["plain", "it's [a] {b} %41 #1", "what?mode=ro", "ü & ;"])
def test_database_is_written_to_folder_of_logger(name, tmp_path):
    from mlflow.tracking import MlflowClient

    folder = tmp_path / name
    folder.mkdir()
    logger = MLFlowLogger(save_dir=str(folder))
    MlflowClient(logger.tracking_uri).create_experiment("one")
    assert (folder / "mlflow.db").is_file()
    assert sqlite_path(sqlite_uri(folder / "mlflow.db")) == folder / "mlflow.db"
