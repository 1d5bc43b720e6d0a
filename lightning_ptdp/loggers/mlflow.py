"""Lightning's MLflow logger, made lazy, rank-safe and safe across a fork.

The constructor of Lightning's own logger imports mlflow and creates the database on every rank.
With a new SQLite file all ranks but one crash. It also starts threads, which must not cross a fork.
This logger does nothing until its first use on global rank 0. The other ranks get a dummy."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import uuid
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing import util
from pathlib import Path

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_ptdp.base.data_record import DatasetRecord
from lightning_ptdp.base.option_types import check_writable_folder
from lightning_ptdp.base.signals import handled
from lightning_ptdp.loggers.background_writer import (
    BackgroundWriter,
    append_metrics,
    keep_metrics,
    unwritten_file,
)
from lightning_ptdp.loggers.connection import (
    LIMIT_S,
    AbsentRun,
    Client,
    OpenRun,
    RunOptions,
    causes,
    connect,
    finish_monitor,
    is_unanswered,
    start_monitor,
)
from lightning_ptdp.loggers.mlflow_entities import (
    allowed_name,
    as_input,
    grouped_name,
    new_parameters,
)
from lightning_ptdp.loggers.tracking_store import (
    SilentServerError,
    check_store,
    sqlite_uri,
)

_PARAMS_PER_BATCH = 100
_DESCRIPTION = "mlflow.note.content"
# Lightning's exception has two namespaces; Terminated is the command line's.
_TOLD_TO_END = ("KeyboardInterrupt", "SIGTERMException", "Terminated")


class MLFlowLogger(Logger):
    """Logger for MLflow, by default with an SQLite file in ``save_dir``.

    Metrics are grouped by prefix: ``train_loss`` is ``train/loss`` in the store, ``val_loss`` is
    ``val/loss``, and speed is below ``system/``.

    A background thread writes metrics, texts and tags, and training does not wait for the store.
    All of them are written by the end of ``finalize``. A run is FINISHED if training ends well,
    KILLED if Ctrl-C or SIGTERM ended it, and FAILED otherwise. Checkpoints are saved in
    ``save_dir/experiment_name/run_id/checkpoints``.

    MLflow's own telemetry is off unless ``MLFLOW_DISABLE_TELEMETRY`` is already set in the
    environment: the variable must be set before mlflow is imported, so it is set to "true" at first
    use. A request to a server takes at most 30 s and is repeated once, unless
    ``MLFLOW_HTTP_REQUEST_TIMEOUT`` and ``MLFLOW_HTTP_REQUEST_MAX_RETRIES`` are set.

    Args:
        experiment_name: Name of the group of runs.
        run_name: Name in MLflow's list of runs; None: the experiment's name and the time (``ptdp
            fit``: recipe, layout and time).
        save_dir: Folder of the database, the artifacts and the checkpoints.
        tracking_uri: Store or server, by default that of the environment variable
            ``MLFLOW_TRACKING_URI`` at import; None: ``sqlite:///<save_dir>/mlflow.db``.
        tags: Tags of the run.
        prefix: Prefix of every metric name, joined by "-", before the group.
        artifact_location: Folder or address of artifacts; None: ``<save_dir>/artifacts`` for the
            default store, else the server's choice.
        run_id: Run to resume: metrics are appended, and only parameters that it does not have yet
            are logged.
        log_model: Copy checkpoints to the artifacts, as Lightning's logger does: False, True (at
            the end) or "all".
        log_system_metrics: Also log CPU, memory, disk, network and GPUs of rank 0's machine every
            10 seconds, by MLflow's own monitor (``MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL`` sets
            another interval, in seconds).
    """

    def __init__(  # noqa: PLR0913
        self,
        experiment_name: str = "lightning-ptdp",
        run_name: str | None = None,
        save_dir: str = "runs",
        tracking_uri: str | None = os.getenv("MLFLOW_TRACKING_URI") or None,
        tags: dict[str, object] | None = None,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        log_model: bool | str = False,
        log_system_metrics: bool = False,
    ) -> None:
        super().__init__()
        folder = Path(save_dir).absolute()
        if tracking_uri is None:
            tracking_uri = sqlite_uri(folder / "mlflow.db")
            artifact_location = artifact_location or (folder / "artifacts").as_uri()
        self._save_dir = str(folder)
        self._run_id = run_id
        self._may_be_gone = False
        self._prefix = prefix
        self._options = RunOptions(
            experiment_name=experiment_name,
            tracking_uri=tracking_uri,
            run_name=run_name,
            tags={key: str(value) for key, value in (tags or {}).items()},
            artifact_location=artifact_location,
            log_model=log_model,
        )
        self._log_system_metrics = log_system_metrics
        self._run: OpenRun | None = None
        self._silence: SilentServerError | None = None
        self._was_ended = False
        self._epoch = 0.0

    @property
    def tracking_uri(self) -> str:
        """Return the address of the tracking store."""
        return self._options.tracking_uri

    @property
    def save_dir(self) -> str:
        """Return the local folder of this logger, absolute."""
        return self._save_dir

    @property
    def name(self) -> str:
        """Return the experiment's name."""
        return self._options.experiment_name

    @property
    def version(self) -> str | None:
        """Return the run id.

        Ranks other than global rank 0 know it only if a run is resumed. (Lightning broadcasts
        folders itself.)"""
        return self.run_id

    @property
    def run_id(self) -> str | None:
        """Return the run id; creates the run on global rank 0."""
        if rank_zero_only.rank == 0 and not self._was_ended:
            self._open()
        return self._run_id

    @property
    def url(self) -> str:
        """Return the address of the run in a browser, in MLflow's view for training.

        The address is on the server, or on the server of ``mlflow ui`` if the store is a file. If
        the server does not answer, return the path of the file of metrics. Global rank 0 only."""
        run = self._open().inner
        if isinstance(run, AbsentRun):
            return str(unwritten_file(self._folder))
        server = (
            self.tracking_uri if self.tracking_uri.startswith("http") else "http://127.0.0.1:5000"
        )
        page = f"experiments/{run.experiment_id}/runs/{self.run_id}"
        return f"{server.rstrip('/')}/#/{page}?workflowType=machine_learning"

    def set_layout(self, layout: str) -> None:
        """Add the layout to the default name of the run; call it before the run is created."""
        self._options = replace(self._options, layout=layout)

    @property
    @rank_zero_experiment
    def experiment(self) -> Client:
        """Return the ``MlflowClient``; a dummy on ranks other than global 0."""
        return self._open().inner.experiment

    def continue_run_of(self, checkpoint: str | Path) -> bool:
        """Continue the run that wrote ``checkpoint``; return True if this is possible.

        It is possible if this logger wrote the checkpoint and no ``run_id`` was given. If the store
        no longer has the run, a new run is started, with a warning.
        """
        root = Path(self._save_dir, self.name).resolve()
        path = Path(checkpoint).resolve()
        if self._run_id is not None or not path.is_relative_to(root) or path.parent == root:
            return False
        self._run_id = path.relative_to(root).parts[0]
        self._may_be_gone = True
        return True

    @property
    def stored_run(self) -> str | None:
        """Return the id of the run that this process has opened in the store, or None."""
        run = self._here()
        return None if run is None or isinstance(run.inner, AbsentRun) else self._run_id

    def follow(self, run_id: str | None) -> None:
        """Log to a run that a process started by this one has opened and ended."""
        if run_id is not None:
            self._run_id = run_id
            self._was_ended = True
            self._may_be_gone = False

    def check(self) -> None:
        """Check before training that the store can be written; nothing is changed.

        A server that accepts connections and does not answer is not an error: training starts
        without it, with a warning.

        Raises:
            ValueError: ``save_dir`` or ``tracking_uri`` cannot be used.
        """
        self._silence = None
        try:
            self._check_store()
        except SilentServerError as error:
            self._silence = error

    def _check_store(self) -> None:
        check_writable_folder(Path(self._save_dir), f"save_dir={self._save_dir!r}")
        check_store(self.tracking_uri)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Queue metrics under their grouped names (``train/loss``); returns at once."""
        from mlflow.entities import Metric

        writer = self._open().writer
        now_ms = int(time.time() * 1000)
        prefix = f"{self._prefix}-" if self._prefix else ""
        for name, value in metrics.items():
            if name == "epoch":  # Lightning adds it to every metric
                if value == self._epoch:
                    continue
                self._epoch = value
            key = allowed_name(f"{prefix}{grouped_name(name)}")
            writer.put(Metric(key, float(value), now_ms, step or 0))

    @rank_zero_only
    def log_hyperparams(
        self, params: Mapping[str, object] | Namespace, *args: object, **kwargs: object
    ) -> None:
        """Log parameters that the run does not have yet.

        MLflow refuses to change a parameter. If a resumed run has other values, there is a
        warning."""
        client = self.experiment
        run_id = self.run_id
        if isinstance(self._open().inner, AbsentRun):
            return
        new_params = new_parameters(params, client.get_run(run_id).data.params, run_id)
        for start in range(0, len(new_params), _PARAMS_PER_BATCH):
            client.log_batch(run_id, params=new_params[start : start + _PARAMS_PER_BATCH])

    def log_tags(self, tags: Mapping[str, object]) -> None:
        """Set tags on the run; unlike parameters they may change."""
        values = {key: str(value) for key, value in tags.items()}
        self._later(lambda client, run: [client.set_tag(run, *tag) for tag in values.items()])

    def log_description(self, text: str) -> None:
        """Set the text that MLflow's page of the run begins with, unless ``tags`` has one."""
        if _DESCRIPTION not in self._options.tags:
            self.log_tags({_DESCRIPTION: text})

    def log_text(self, text: str, artifact_file: str) -> None:
        """Store ``text`` as an artifact of the run."""
        self._later(lambda client, run: client.log_text(run, text, artifact_file))

    def log_table(self, columns: Mapping[str, list[object]], artifact_file: str) -> None:
        """Append rows to a table, which MLflow's pages show."""
        table = dict(columns)
        self._later(lambda client, run: client.log_table(run, table, artifact_file))

    def log_dataset(self, dataset: DatasetRecord) -> None:
        """Log a dataset of the run, as MLflow's pages show datasets."""
        self._later(lambda client, run: client.log_inputs(run, datasets=[as_input(dataset)]))

    @rank_zero_only
    def _later(self, action: Callable[[Client, str | None], object]) -> None:
        """Queue a call with the client and the run id; returns at once."""
        client = self.experiment
        run_id = self.run_id
        self._open().writer.later(lambda: action(client, run_id), limit_s=LIMIT_S)

    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Copy the checkpoint to the artifacts if ``log_model`` asks for it.

        If that fails, there is a warning, and training continues."""
        if self._options.log_model:
            inner = self._open().inner
            try:
                inner.after_save_checkpoint(checkpoint_callback)
            except Exception as error:
                warnings.warn(
                    f"a checkpoint was not copied to run {self._run_id} in "
                    f"{self.tracking_uri}: {error}",
                    stacklevel=2,
                )

    def save(self) -> None:
        """Do nothing. Lightning calls this after every metric, and would wait for the store."""

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Flush, and end the run.

        The run is FINISHED for the status "success" or "finished". For any other status it is
        KILLED if Ctrl-C or SIGTERM ended training, and FAILED otherwise.

        Metrics that an unavailable store does not accept are kept in the file
        ``unwritten_metrics.jsonl`` of the run's folder, with a warning. If that file cannot be
        written either, for example on a full disk, the warning names the lost metrics."""
        run = self._here()
        if run is None:
            return
        run.finalized = True
        is_success = status in ("success", "finished")
        final_status = status
        if not is_success:
            # Lightning's status says that the run failed, but not by which exception.
            raised = {
                kind.__name__ for cause in causes(sys.exc_info()[1]) for kind in type(cause).__mro__
            }
            final_status = "failed" if raised.isdisjoint(_TOLD_TO_END) else "KILLED"
        if run.monitor is not None:
            # In the thread, because it calls the store, which may not answer.
            run.writer.later(partial(finish_monitor, run.monitor), limit_s=0.0)
            run.monitor = None
        end = partial(run.inner.finalize, final_status)
        terminations: list[int] = []
        # Launchers send it to a rank that ends later than the others.
        with handled(signal.SIGTERM, lambda number, _: terminations.append(number)):
            self._end(run, end, copies=bool(self._options.log_model) and is_success)
        for number in terminations[:1]:
            signal.raise_signal(number)

    def _end(self, run: OpenRun, end: Callable[[], object], *, copies: bool) -> None:
        """Write all metrics, and call ``end``."""
        try:
            if copies:
                run.writer.run(lambda: None, limit_s=LIMIT_S)
                # It copies the last checkpoint, which has no limit; each request has one.
                end()
            else:
                run.writer.run(end, limit_s=LIMIT_S)
        except Exception as error:
            note = keep_metrics(self._folder, run.writer.unwritten)
            warnings.warn(
                f"run {self._run_id} could not be ended in {self.tracking_uri}, {note}: {error}",
                stacklevel=2,
            )

    def _here(self) -> OpenRun | None:
        """Return the run that was opened in this process."""
        return self._run if self._run is not None and self._run.process == os.getpid() else None

    def _open(self) -> OpenRun:
        run = self._here()
        if run is None:
            run = self._run = self._connected()
            if multiprocessing.parent_process() is not None:
                # A worker that fails ends without Lightning's finalize, and without Python's
                # atexit.
                util.Finalize(None, self._end_at_exit, exitpriority=10)
        return run

    def _connected(self) -> OpenRun:
        """Return the run in the store.

        If the server does not answer, return a run that keeps its metrics in a file."""
        try:
            if self._silence is not None:
                raise self._silence
            self._check_store()
            inner = connect(
                self._options,
                self._run_id,
                may_be_gone=self._may_be_gone,
                reopens=not self._was_ended,
            )
        except Exception as error:
            if not is_unanswered(error):
                raise
            return self._absent(error)
        # Not in the thread: while a step acts as another rank, Lightning returns a dummy there.
        client = inner.experiment
        run_id = self._run_id = inner.run_id
        return OpenRun(
            inner=inner,
            writer=BackgroundWriter(lambda metrics: client.log_batch(run_id, metrics=metrics)),
            monitor=start_monitor(run_id, self.tracking_uri)
            if self._log_system_metrics and not self._was_ended
            else None,
        )

    def _absent(self, error: Exception) -> OpenRun:
        self._run_id = self._run_id or uuid.uuid4().hex
        warnings.warn(
            "training continues without the MLflow server. Metrics are kept in "
            f"{unwritten_file(self._folder)}, but parameters, texts and tables are not: {error}",
            stacklevel=2,
        )
        return OpenRun(
            inner=AbsentRun(self._run_id),
            writer=BackgroundWriter(partial(append_metrics, self._folder)),
            monitor=None,
        )

    @property
    def _folder(self) -> Path:
        """Return the folder of the run, which also has its checkpoints."""
        return Path(self._save_dir, self.name, str(self._run_id))

    def _end_at_exit(self) -> None:
        run = self._here()
        if run is not None and not run.finalized:
            self.finalize("failed")

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_run": None}
