"""Lightning's MLflow logger, made lazy, rank-safe and safe across a fork.

What Lightning's own does too early: its constructor imports mlflow and creates the database on every rank (on a fresh SQLite
file all ranks but one crash), and starts what must not cross a fork. Here nothing is touched until the first use on global
rank 0; the other ranks get a dummy.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger as LightningMLFlowLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_ptdp.loggers.names import allowed_name, flat_parameters
from lightning_ptdp.loggers.store import check_store, check_writable_folder, sqlite_path
from lightning_ptdp.loggers.unwritten import keep_metrics
from lightning_ptdp.loggers.writer import BackgroundWriter
from lightning_ptdp.turns import one_at_a_time

__all__ = ["MLFlowLogger"]

_PARAMS_PER_BATCH = 100
_MAX_LISTED = 5
_LIMIT_S = 30.0
_TOLD_TO_END = ("KeyboardInterrupt", "SIGTERMException", "Terminated")  # Lightning's has two namespaces; the command line's own
_MONITOR = "mlflow.system_metrics.system_metrics_monitor"


class MLFlowLogger(Logger):
    """Log to MLflow, by default to an SQLite file in ``save_dir``.

    Metrics, texts and tags are written by a background thread, and all of them by the end of ``finalize``; training does not wait for
    the store. A run is FINISHED when training ends well, KILLED when Ctrl-C or SIGTERM ended it, and FAILED otherwise. Checkpoints land in
    ``save_dir/experiment_name/run_id/checkpoints``.

    MLflow's own telemetry is off unless ``MLFLOW_DISABLE_TELEMETRY`` is already set in the environment: the variable must be
    set before mlflow is imported, so it is set to "true" at first use.

    Args:
        experiment_name: Groups runs.
        run_name: Shown in MLflow's list of runs; None: MLflow makes one up.
        save_dir: Folder of the database, of artifacts and of the checkpoints.
        tracking_uri: Store or server; None: ``sqlite:///<save_dir>/mlflow.db``.
        tags: Set on the run.
        prefix: Put before every metric name, joined by "-".
        artifact_location: Where artifacts go; None: ``<save_dir>/artifacts`` for the default store, else the server's choice.
        run_id: Resume this run: metrics are appended, only parameters that it does not have yet are logged.
        log_model: Copy checkpoints to the artifacts, as Lightning's logger does: False, True (at the end) or "all".
        log_system_metrics: Also log CPU, memory, disk, network and GPUs of rank 0's machine every 10 seconds, by MLflow's own monitor
            (``MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL`` is another interval, in seconds).
    """

    def __init__(
        self,
        experiment_name: str = "lightning-ptdp",
        run_name: str | None = None,
        save_dir: str = "runs",
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        log_model: bool | str = False,
        log_system_metrics: bool = False,
    ) -> None:
        super().__init__()
        folder = Path(save_dir).absolute()
        if tracking_uri is None:
            tracking_uri = f"sqlite:///{folder / 'mlflow.db'}"
            artifact_location = artifact_location or (folder / "artifacts").as_uri()
        self._experiment_name = experiment_name
        self._save_dir = str(folder)
        self._tracking_uri = tracking_uri
        self._run_id = run_id
        self._may_be_gone = False
        self._prefix = prefix
        self._tags = dict(tags or {})
        self._options: dict[str, Any] = {
            "run_name": run_name,
            "tags": self._tags,
            "artifact_location": artifact_location,
            "log_model": log_model,
        }
        self._log_system_metrics = log_system_metrics
        self._monitor: Any = None
        self._inner: LightningMLFlowLogger | None = None
        self._writer: BackgroundWriter[Any] | None = None
        self._opened_by: int | None = None
        self._finalized = False

    @property
    def tracking_uri(self) -> str:
        """Where the runs are stored."""
        return self._tracking_uri

    @property
    def save_dir(self) -> str:
        """Local folder of this logger, absolute."""
        return self._save_dir

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self._experiment_name

    @property
    def version(self) -> str | None:
        """The run id; on ranks other than global 0 only known when resuming (Lightning broadcasts folders itself)."""
        return self.run_id

    @property
    def run_id(self) -> str | None:
        """The run id; creates the run on global rank 0."""
        if rank_zero_only.rank == 0:
            self._open()
        return self._run_id

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The ``MlflowClient``; a dummy on ranks other than global 0."""
        return self._open().experiment

    def continue_run_of(self, checkpoint: str | Path) -> bool:
        """Go on with the run that wrote ``checkpoint``, if this logger did and was not told a ``run_id``; whether it will.

        Where the store does not have that run any more, a new one is started, with a warning.
        """
        home, path = Path(self._save_dir, self._experiment_name).resolve(), Path(checkpoint).resolve()
        if self._run_id is not None or not path.is_relative_to(home) or path.parent == home:
            return False
        self._run_id, self._may_be_gone = path.relative_to(home).parts[0], True
        return True

    def check(self) -> None:
        """Find out that the store cannot be written before training starts; touches nothing.

        Raises:
            ValueError: ``save_dir`` or ``tracking_uri`` cannot be used.
        """
        check_writable_folder(Path(self._save_dir), f"save_dir={self._save_dir!r}")
        check_store(self._tracking_uri)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Queue metrics; returns at once."""
        from mlflow.entities import Metric

        self._open()
        assert self._writer is not None
        now_ms = int(time.time() * 1000)
        prefix = f"{self._prefix}-" if self._prefix else ""
        for name, value in metrics.items():
            self._writer.put(Metric(allowed_name(f"{prefix}{name}"), float(value), now_ms, step or 0))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Log parameters that the run does not have yet: MLflow refuses to change one. A resumed run may differ; that is a warning."""
        from mlflow.entities import Param

        client, run_id = self.experiment, self.run_id
        known = client.get_run(run_id).data.params
        found = dict(flat_parameters(params))
        changed = [f"{key}={known[key]} there, {found[key]} here" for key in found if known.get(key, found[key]) != found[key]]
        if changed:
            more = f"; and {len(changed) - _MAX_LISTED} more" if len(changed) > _MAX_LISTED else ""
            warnings.warn(
                f"run {run_id} goes on with other parameters, of which MLflow keeps the first: {'; '.join(changed[:_MAX_LISTED])}{more}",
                stacklevel=2,
            )
        fresh = [Param(key, value) for key, value in found.items() if key not in known]
        for start in range(0, len(fresh), _PARAMS_PER_BATCH):
            client.log_batch(run_id, params=fresh[start : start + _PARAMS_PER_BATCH])

    @rank_zero_only
    def log_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags on the run; unlike parameters they may change."""
        client, run_id = self.experiment, self.run_id
        found = {key: str(value) for key, value in tags.items()}
        self._later(lambda: [client.set_tag(run_id, key, value) for key, value in found.items()])

    @rank_zero_only
    def log_text(self, text: str, artifact_file: str) -> None:
        """Store ``text`` as an artifact of the run."""
        client, run_id = self.experiment, self.run_id
        self._later(lambda: client.log_text(run_id, text, artifact_file))

    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Copy the checkpoint to the artifacts if ``log_model`` asks for it; where that fails there is a warning, and training goes on."""
        if self._options["log_model"]:
            inner = self._open()
            try:
                inner.after_save_checkpoint(checkpoint_callback)
            except Exception as error:
                warnings.warn(f"a checkpoint is not copied to run {self._run_id} in {self._tracking_uri}: {error}", stacklevel=2)

    def save(self) -> None:
        """Nothing: Lightning calls this after every metric, and would wait for the store."""

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Flush, and end the run as FINISHED, or, for any status but "success" and "finished", as KILLED if Ctrl-C or SIGTERM is what
        ended training, and FAILED otherwise.

        What a store that is away does not take is kept in the file ``unwritten_metrics.jsonl`` of the run's folder, with a warning; where
        that cannot be written either, as on a disk that is full, the warning names what is lost.
        """
        if not self._is_open():
            return
        self._finalized = True
        inner, ended = self._open(), status
        if status not in ("success", "finished"):
            ended = "KILLED" if _told_to_end(sys.exc_info()[1]) else "failed"
        assert self._writer is not None
        if self._monitor is not None:
            # In the thread: it asks the store, which may not answer.
            self._writer.later(partial(_finish, self._monitor), limit_s=0.0)
            self._monitor = None
        try:
            self._writer.run(lambda: inner.finalize(ended), limit_s=_LIMIT_S)
        except Exception as error:
            folder = Path(self._save_dir, self._experiment_name, str(self._run_id))
            kept = keep_metrics(folder, self._writer.unwritten)
            warnings.warn(f"run {self._run_id} could not be ended in {self._tracking_uri}, {kept}: {error}", stacklevel=2)

    def _is_open(self) -> bool:
        return self._inner is not None and self._opened_by == os.getpid()

    def _open(self) -> LightningMLFlowLogger:
        """Lightning's logger, made in the process that uses it: connections and threads must not cross a fork."""
        if not self._is_open():
            self.check()
            self._inner, self._opened_by, self._finalized = self._connect(), os.getpid(), False
            self._run_id = self._inner.run_id
            self._writer = BackgroundWriter(self._write_metrics)
            self._monitor = self._start_monitor() if self._log_system_metrics else None
            if multiprocessing.parent_process() is not None:
                # A worker that fails ends without Lightning's finalize, and without Python's atexit.
                util.Finalize(None, self._end_at_exit, exitpriority=10)
        assert self._inner is not None
        return self._inner

    def _connect(self) -> LightningMLFlowLogger:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        path = sqlite_path(self._tracking_uri)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        folder = path.parent if path is not None else None
        chatty = ("alembic", "mlflow.store.db.utils", "mlflow.store.db", "lightning.pytorch.loggers.mlflow")
        # Of several processes that find no tables all but one would fail over making them.
        with one_at_a_time(folder, limit_s=_LIMIT_S), _quiet(*chatty):
            inner, client = self._found()
        if self._run_id is not None:
            client.update_run(self._run_id, status="RUNNING")
            for key, value in self._tags.items():
                client.set_tag(self._run_id, key, value)
        return inner

    def _found(self) -> tuple[LightningMLFlowLogger, Any]:
        """Lightning's logger of the run and its client; a new database gets its tables here."""
        inner = self._inner_of(self._run_id)
        try:
            return inner, _find_run(inner, self._run_id)
        except ValueError as error:
            if not self._may_be_gone:
                raise
            warnings.warn(f"{error.__cause__ or error}: a new run is started instead of {self._run_id}", stacklevel=2)
            self._run_id, self._may_be_gone = None, False
            inner = self._inner_of(None)
            return inner, _find_run(inner, None)

    def _inner_of(self, run_id: str | None) -> LightningMLFlowLogger:
        return LightningMLFlowLogger(
            experiment_name=self._experiment_name, tracking_uri=self._tracking_uri, run_id=run_id, **self._options
        )

    def _start_monitor(self) -> Any:
        """MLflow's thread that logs what the machine does; a run that goes on counts its samples on."""
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        with _quiet(_MONITOR):
            monitor = SystemMetricsMonitor(self._run_id, resume_logging=True, tracking_uri=self._tracking_uri)
            monitor.start()
        return monitor

    def _later(self, action: Callable[[], object]) -> None:
        assert self._writer is not None
        self._writer.later(action, limit_s=_LIMIT_S)

    def _write_metrics(self, metrics: Sequence[Any]) -> None:
        assert self._inner is not None
        self._inner.experiment.log_batch(self._run_id, metrics=metrics)

    def _end_at_exit(self) -> None:
        if self._is_open() and not self._finalized:
            self.finalize("failed")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_inner": None, "_writer": None, "_monitor": None, "_opened_by": None}


def _find_run(inner: LightningMLFlowLogger, run_id: str | None) -> Any:
    """Make or find the run; the client."""
    from mlflow.exceptions import MlflowException

    try:
        client = inner.experiment
        if run_id is not None and (stage := client.get_run(run_id).info.lifecycle_stage) != "active":
            raise MlflowException(f"Run '{run_id}' is {stage}")
        return client
    except MlflowException as error:
        if run_id is None:
            raise
        raise ValueError(f"run_id={run_id!r} cannot be resumed ({error}); leave run_id out to start a new run") from error


def _told_to_end(error: BaseException | None) -> bool:
    """Whether a signal is behind what is being handled: Lightning tells loggers no more than that something went wrong."""
    while error is not None:
        if any(kind.__name__ in _TOLD_TO_END for kind in type(error).__mro__):
            return True
        error = error.__context__
    return False


def _finish(monitor: Any) -> None:
    with _quiet(_MONITOR):
        monitor.finish()


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Silence the chatter of a new database (some fifty migration messages) while it is made."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
