"""A run in an MLflow store: made, or found again and set going."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from lightning.pytorch.loggers import MLFlowLogger as LightningMLFlowLogger

from lightning_ptdp.base.file_locks import one_at_a_time
from lightning_ptdp.loggers.absent_server import AbsentRun, is_unanswered
from lightning_ptdp.loggers.background_writer import BackgroundWriter
from lightning_ptdp.loggers.tracking_store import sqlite_path

# imported when it is used: here, because the parser reads such imports where a class of its own is
if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
    from mlflow.tracking import MlflowClient

__all__ = ["LIMIT_S", "Client", "OpenRun", "RunOptions", "connect", "quiet", "set_defaults"]

Client: TypeAlias = "MlflowClient"

LIMIT_S = 30.0
_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # of a table, which is read to be appended to
    "MLFLOW_HTTP_REQUEST_TIMEOUT": f"{LIMIT_S:.0f}",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
_CHATTY = (
    "alembic",
    "mlflow.store.db.utils",
    "mlflow.store.db",
    "lightning.pytorch.loggers.mlflow",
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Arguments of Lightning's logger that describe a run; see ``MLFlowLogger``.

    Attributes:
        run_name: None: made of the experiment's name, the layout and the time. MLflow would make
            one up, from draws that a seed makes the same in every run.
        layout: As far as it is known.
    """

    experiment_name: str
    tracking_uri: str
    run_name: str | None
    tags: dict[str, object]
    artifact_location: str | None
    log_model: bool | str
    layout: str = ""


@dataclass
class OpenRun:
    """Open connection to a run and the process that owns it; connections and threads must not cross
    a fork."""

    inner: LightningMLFlowLogger | AbsentRun
    writer: BackgroundWriter[Metric]
    monitor: SystemMetricsMonitor | None
    process: int = field(default_factory=os.getpid)
    finalized: bool = False


def set_defaults() -> None:
    """Set MLflow's own variables, where the user has not: no telemetry, and a limit for every
    request (120 s, eight times, by default)."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def connect(options: RunOptions, run_id: str | None, *, may_be_gone: bool) -> LightningMLFlowLogger:
    """Lightning's logger of a new run, or of ``run_id``, which goes on; a new database gets its
    tables here.

    Args:
        options: Of the run.
        run_id: To be resumed.
        may_be_gone: Whether a new run is started, with a warning, where the store has that one no
            more.

    Raises:
        ValueError: The run cannot be resumed.
    """
    set_defaults()
    path = sqlite_path(options.tracking_uri)
    folder = None if path is None else path.parent
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    # Of several processes that find no tables all but one would fail over making them.
    with one_at_a_time(folder, limit_s=LIMIT_S), quiet(*_CHATTY):
        try:
            inner = _find(options, run_id)
        except ValueError as error:
            if not may_be_gone:
                raise
            warnings.warn(
                f"{error.__cause__ or error}: a new run is started instead of {run_id}",
                stacklevel=2,
            )
            run_id, inner = None, _find(options, None)
    if run_id is not None:
        inner.experiment.update_run(run_id, status="RUNNING")
        for key, value in options.tags.items():
            inner.experiment.set_tag(run_id, key, value)
    return inner


def _find(options: RunOptions, run_id: str | None) -> LightningMLFlowLogger:
    from mlflow.exceptions import MlflowException

    name = (
        options.run_name
        or f"{options.experiment_name} {options.layout} {time.strftime('%Y-%m-%d %H:%M:%S')}".replace(
            "  ", " "
        )
    )
    given = {key: value for key, value in asdict(options).items() if key != "layout"}
    inner = LightningMLFlowLogger(**{**given, "run_name": name}, run_id=run_id)
    try:
        client = inner.experiment
        if (
            run_id is not None
            and (stage := client.get_run(run_id).info.lifecycle_stage) != "active"
        ):
            raise MlflowException(f"Run '{run_id}' is {stage}")
    except MlflowException as error:
        if run_id is None or is_unanswered(error):
            raise
        raise ValueError(
            f"run_id={run_id!r} cannot be resumed ({error}); leave run_id out to start a new run"
        ) from error
    return inner


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silence the chatter of loggers, such as some fifty migration messages of a new database."""
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
