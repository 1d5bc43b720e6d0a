"""Creation of a database: complete or absent, and without waiting for the disk."""

import multiprocessing
import os
import sqlite3

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from lightning_ptdp.loggers import MLFlowLogger


@pytest.fixture
def statements():
    """Yield the statements of all connections to databases."""
    said = []

    def trace(connection, _record):
        connection.set_trace_callback(said.append)

    event.listen(Engine, "connect", trace)
    yield said
    event.remove(Engine, "connect", trace)


def test_logger_creates_its_database_without_waiting(tmp_path, statements):
    assert MLFlowLogger(save_dir=str(tmp_path)).experiment
    off = statements.index("PRAGMA synchronous=OFF")
    created = [at for at, line in enumerate(statements) if line.lstrip().startswith("CREATE TABLE")]
    assert off < min(created)
    assert os.listdir(tmp_path) == ["mlflow.db"]
    statements.clear()
    assert MLFlowLogger(save_dir=str(tmp_path)).experiment
    assert "PRAGMA synchronous=OFF" not in statements
    assert not any("CREATE TABLE" in line for line in statements)


def test_full_disk_during_creation_names_the_database(tmp_path):
    def shrink(connection, _record):
        connection.execute("PRAGMA max_page_count=20")

    event.listen(Engine, "connect", shrink)
    try:
        with pytest.raises(OSError, match=r"^\[Errno 28\] .*mlflow\.db'$"):
            _ = MLFlowLogger(save_dir=str(tmp_path)).experiment
    finally:
        event.remove(Engine, "connect", shrink)
    assert os.listdir(tmp_path) == []


def _end_while_tables_are_created(folder):
    def end(connection, _record):
        connection.set_trace_callback(
            lambda line: os._exit(1) if "tmp_trace_tags" in line else None
        )

    event.listen(Engine, "connect", end)
    _ = MLFlowLogger(save_dir=folder).experiment


def test_process_killed_during_creation_leaves_no_database(tmp_path):
    process = multiprocessing.get_context("spawn").Process(
        target=_end_while_tables_are_created, args=(str(tmp_path),)
    )
    process.start()
    process.join(300)
    assert process.exitcode == 1
    assert not (tmp_path / "mlflow.db").exists()
    assert MLFlowLogger(save_dir=str(tmp_path)).experiment
    assert os.listdir(tmp_path) == ["mlflow.db"]
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        assert database.execute("select count(*) from experiments").fetchone() == (2,)
