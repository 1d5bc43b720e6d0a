"""Connection to a run in an MLflow store: a new run, or an existing one that continues."""

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
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_ptdp.base.time_limit import one_at_a_time
from lightning_ptdp.loggers.background_writer import BackgroundWriter
from lightning_ptdp.loggers.tracking_store import (
    SilentServerError,
    create_database,
    sqlite_path,
)

# Import it when used. The import is repeated here because the parser reads such imports in the file
# of its own class.
if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
    from mlflow.tracking import MlflowClient


Client: TypeAlias = "MlflowClient"

LIMIT_S = 30.0
_CREATION_LIMIT_S = 300.0
_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": f"{LIMIT_S:.0f}",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
_MONITOR = "mlflow.system_metrics.system_metrics_monitor"
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
        run_name: None: the experiment's name, the layout and the time. MLflow would draw a name at
            random, and with the same seed every run would get the same name.
        layout: Layout of the run, as far as it is known.
    """

    experiment_name: str
    tracking_uri: str
    run_name: str | None
    tags: dict[str, str]
    artifact_location: str | None
    log_model: bool | str
    layout: str = ""


class AbsentRun(DummyLogger):
    """Replacement of Lightning's logger for a server that does not answer; sends nothing."""

    def __init__(self, run_id: str) -> None:
        super().__init__()
        self.run_id = run_id


@dataclass
class OpenRun:
    """Open connection to a run, and the process that owns it.

    Connections and threads must not cross a fork."""

    inner: LightningMLFlowLogger | AbsentRun
    writer: BackgroundWriter[Metric]
    monitor: SystemMetricsMonitor | None
    process: int = field(default_factory=os.getpid)
    finalized: bool = False


def set_defaults() -> None:
    """Set MLflow's own variables, unless the user has set them.

    They turn off telemetry and limit the time of every request. By default a request takes up to
    120 s, eight times."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def connect(
    options: RunOptions, run_id: str | None, *, may_be_gone: bool, reopens: bool
) -> LightningMLFlowLogger:
    """Return Lightning's logger of a new run, or of ``run_id``, which continues.

    A new database gets its tables here.

    Args:
        options: Options of the run.
        run_id: Run to resume.
        may_be_gone: Whether a new run is started, with a warning, if the store no longer has
            ``run_id``.
        reopens: Whether a run that continues is marked as running.

    Raises:
        ValueError: The run cannot be created or resumed.
    """
    set_defaults()
    path = sqlite_path(options.tracking_uri)
    folder = None if path is None else path.parent
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    # If several processes find no tables, all but one would fail to create them.
    with one_at_a_time(folder, limit_s=_CREATION_LIMIT_S), quiet(*_CHATTY):
        if path is not None:
            create_database(path)
        try:
            inner = _find(options, run_id)
        except ValueError as error:
            if not may_be_gone:
                raise
            warnings.warn(
                f"{error.__cause__ or error}. A new run is started instead of {run_id}",
                stacklevel=2,
            )
            run_id = None
            inner = _find(options, None)
    if run_id is not None and reopens:
        inner.experiment.update_run(run_id, status="RUNNING")
        for key, value in options.tags.items():
            inner.experiment.set_tag(run_id, key, value)
    return inner


def _find(options: RunOptions, run_id: str | None) -> LightningMLFlowLogger:
    from mlflow.exceptions import MlflowException

    arguments = asdict(options)
    parts = (options.experiment_name, arguments.pop("layout"), time.strftime("%Y-%m-%d %H:%M:%S"))
    arguments["run_name"] = options.run_name or " ".join(filter(None, parts))
    inner = LightningMLFlowLogger(**arguments, run_id=run_id)
    try:
        client = inner.experiment
        if (
            run_id is not None
            and (stage := client.get_run(run_id).info.lifecycle_stage) != "active"
        ):
            raise MlflowException(f"Run '{run_id}' is {stage}")
    except MlflowException as error:
        if is_unanswered(error):
            raise
        if run_id is None:
            if not options.tracking_uri.startswith("http"):
                raise  # a file needs no credentials, and MLflow says what is wrong
            raise ValueError(
                f"tracking_uri={options.tracking_uri!r}: MLflow creates no run ({error}). Check the "
                "address, experiment_name and the credentials (MLFLOW_TRACKING_USERNAME and "
                "_PASSWORD, or MLFLOW_TRACKING_TOKEN), or leave tracking_uri out to log to a local "
                "file"
            ) from error
        raise ValueError(
            f"run_id={run_id!r} cannot be resumed ({error}). Leave run_id out to start a new run"
        ) from error
    return inner


def is_unanswered(error: BaseException | None) -> bool:
    """Return True if a server gave no answer, and False if it refused the request."""
    from requests.exceptions import RequestException

    return any(isinstance(cause, SilentServerError | RequestException) for cause in causes(error))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def start_monitor(run_id: str | None, tracking_uri: str) -> SystemMetricsMonitor:
    """Start the monitor; in a resumed run its sample numbers continue."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    with quiet(_MONITOR):
        monitor = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=tracking_uri)
        monitor.start()
    return monitor


def finish_monitor(monitor: SystemMetricsMonitor) -> None:
    """End the monitor, without its messages."""
    with quiet(_MONITOR):
        monitor.finish()


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silence loggers, such as some fifty migration messages of a new database."""
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
