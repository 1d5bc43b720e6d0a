"""Creation of a database without waiting for the disk."""

import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.engine import Engine

from lightning_ptdp.loggers import MLFlowLogger
from lightning_ptdp.loggers.tracking_store import unsynchronized_if_new

OFF, FULL = 0, 2


@pytest.fixture
def statements():
    """Yield the statements of all connections to databases."""
    said = []

    def trace(connection, _record):
        connection.set_trace_callback(said.append)

    event.listen(Engine, "connect", trace)
    yield said
    event.remove(Engine, "connect", trace)


def synchronous(engine):
    with engine.connect() as connection:
        return connection.exec_driver_sql("PRAGMA synchronous").scalar()


def test_only_creation_of_new_database_does_not_wait(tmp_path):
    path = tmp_path / "new.db"
    engine = create_engine(f"sqlite:///{path}")
    with unsynchronized_if_new(path):
        assert synchronous(engine) == OFF
    assert synchronous(engine) == FULL
    assert path.exists()
    with unsynchronized_if_new(path):
        assert synchronous(create_engine(f"sqlite:///{path}")) == FULL


def test_logger_creates_its_database_without_waiting(tmp_path, statements):
    assert MLFlowLogger(save_dir=str(tmp_path)).experiment
    off, full = (statements.index(f"PRAGMA synchronous={value}") for value in ("OFF", "FULL"))
    created = [at for at, line in enumerate(statements) if line.lstrip().startswith("CREATE TABLE")]
    assert off < min(created)
    assert max(created) < full
    statements.clear()
    assert MLFlowLogger(save_dir=str(tmp_path)).experiment
    assert "PRAGMA synchronous=OFF" not in statements
