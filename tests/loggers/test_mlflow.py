"""Tests of the MLflow logger: lazy start, many ranks, forks, flushing and resuming."""

import contextlib
import copy
import errno
import json
import multiprocessing
import os
import pickle
import re
import resource
import runpy
import signal
import sqlite3
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import MLFlowLogger as LightningMLFlowLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from mlflow.entities import Metric

from lightning_ptdp.base.data_record import DatasetRecord
from lightning_ptdp.base.signals import handled
from lightning_ptdp.loggers import MLFlowLogger, mlflow
from lightning_ptdp.loggers.background_writer import BackgroundWriter
from lightning_ptdp.models import GPTConfig

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def rank_zero():
    before = rank_zero_only.rank
    rank_zero_only.rank = 0
    yield
    rank_zero_only.rank = before


@pytest.fixture(scope="module")
def save_dir(tmp_path_factory):
    """Return one store for the whole module, because creating a database takes seconds."""
    return tmp_path_factory.mktemp("runs")


def client_of(logger):
    from mlflow import MlflowClient

    return MlflowClient(logger.tracking_uri)


def history(logger, name):
    return sorted(
        (m.step, m.value) for m in client_of(logger).get_metric_history(logger.run_id, name)
    )


def test_store_is_untouched_before_first_use(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)  # an import of it raises
    logger = MLFlowLogger(save_dir=str(tmp_path / "runs"))
    logger.check()
    logger.save()
    logger.finalize("success")
    assert (logger.name, logger.save_dir) == ("lightning-ptdp", str(tmp_path / "runs"))
    rank_zero_only.rank = 1
    logger.log_metrics({"loss": 1.0}, 0)
    logger.log_hyperparams({"a": 1})
    logger.experiment.anything("goes")
    assert logger.version is None
    assert list(tmp_path.iterdir()) == []


def test_store_of_environment_is_the_default_as_in_lightning(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    fresh = runpy.run_path(mlflow.__file__)["MLFlowLogger"]
    assert fresh().tracking_uri == "http://localhost:5000"
    assert fresh(tracking_uri="sqlite:///other.db").tracking_uri == "sqlite:///other.db"
    assert fresh(tracking_uri=None).tracking_uri.endswith("runs/mlflow.db")


def test_finalize_flushes_metrics_and_artifacts(save_dir):
    logger = MLFlowLogger(save_dir=str(save_dir), tags={"purpose": "test"})
    for step in range(200):
        logger.log_metrics({"train_loss": float(step)}, step)
    logger.log_text("hello", "note.txt")
    logger.finalize("success")
    run = client_of(logger).get_run(logger.run_id)
    assert history(logger, "train/loss") == [(step, float(step)) for step in range(200)]
    assert run.info.status == "FINISHED"
    assert run.data.tags["purpose"] == "test"
    assert Path(run.info.artifact_uri.removeprefix("file://"), "note.txt").read_text() == "hello"
    assert (logger.save_dir, logger.name, logger.version) == (
        str(save_dir),
        "lightning-ptdp",
        logger.run_id,
    )


def test_parameters_are_flattened_and_truncated(save_dir):
    logger = MLFlowLogger(save_dir=str(save_dir))
    logger.log_hyperparams(
        {
            "config": GPTConfig(num_layers=3),
            "list[0]": [1, 2],
            "long": "x" * 7000,
            "none": None,
            "_instantiator": "x",
        }
    )
    parameters = client_of(logger).get_run(logger.run_id).data.params
    assert parameters["config.num_layers"] == "3"
    assert parameters["list_0_"] == "[1, 2]"
    assert len(parameters["long"]) == 500
    assert not parameters.keys() & {"none", "_instantiator"}


def test_run_name_has_layout_and_time(save_dir):
    named, unnamed = (
        MLFlowLogger(save_dir=str(save_dir), run_name="mine", tags={"trial": 3}),
        MLFlowLogger(save_dir=str(save_dir)),
    )
    assert named._options.tags == {"trial": "3"}, "a server takes texts only"
    for logger in (named, unnamed):
        logger.set_layout("t2 p2 v1 d1")
    client, run = client_of(unnamed), client_of(unnamed).get_run(unnamed.run_id)
    assert re.fullmatch(
        r"lightning-ptdp t2 p2 v1 d1 \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", run.info.run_name
    )
    assert client.get_run(named.run_id).info.run_name == "mine"
    page = (
        f"experiments/{run.info.experiment_id}/runs/{unnamed.run_id}?workflowType=machine_learning"
    )
    assert unnamed.url == f"http://127.0.0.1:5000/#/{page}"


def test_epoch_is_logged_when_it_changes(save_dir):
    logger = MLFlowLogger(save_dir=str(save_dir))
    for step, epoch in enumerate([0.0, 0.0, 1.0, 1.0, 2.0]):
        logger.log_metrics({"loss": 1.0, "epoch": epoch}, step)
    logger.finalize("success")
    assert history(logger, "epoch") == [(2, 1.0), (4, 2.0)]


def test_metrics_are_grouped_by_prefix(save_dir):
    names = {
        "train_loss": "train/loss",
        "learning_rate/1": "train/learning_rate/1",
        "expert_load_max": "train/expert_load_max",
        "val_expert_load_max": "val/expert_load_max",
        "val_loss/dataloader_idx_1": "val/loss/dataloader_idx_1",
        "test_loss": "test/loss",
        "mfu": "system/mfu",
        "timeline/overhead": "timeline/overhead",
        "accuracy": "accuracy",
    }
    logger = MLFlowLogger(save_dir=str(save_dir), tags={"mlflow.note.content": "mine"})
    logger.log_metrics(dict.fromkeys(names, 1.0), 1)
    logger.log_description("another")
    logger.finalize("success")
    run = client_of(logger).get_run(logger.run_id)
    assert run.data.metrics.keys() == {*names.values()}
    assert run.data.tags["mlflow.note.content"] == "mine"


def test_invalid_names_block_no_other_metric(save_dir):
    logger = MLFlowLogger(save_dir=str(save_dir))
    names = ["/loss", "train_a//b", "a/../c/", "x" * 300, ".", ""]
    for step, name in enumerate([*names, "last"]):
        logger.log_metrics({name: float(step)}, step)
    logger.log_hyperparams({"shares": {"data/": 0.5}})
    logger.finalize("success")
    run = client_of(logger).get_run(logger.run_id)
    found = {**run.data.metrics}
    assert found == {
        "loss": 0.0,
        "train/a/b": 1.0,
        "a/c": 2.0,
        "x" * 250: 3.0,
        "_": 5.0,
        "last": 6.0,
    }
    assert run.info.status == "FINISHED"
    assert run.data.params == {"shares.data": "0.5"}


def test_dataset_is_logged_as_run_input(save_dir):
    record = DatasetRecord(
        name="web",
        context="training",
        digest="f" * 64,
        source={"places": ["/web"]},
        profile={"tokens": 7},
    )
    logger = MLFlowLogger(save_dir=str(save_dir))
    logger.log_dataset(record)
    logger.finalize("success")
    (found,) = client_of(logger).get_run(logger.run_id).inputs.dataset_inputs
    assert (found.dataset.name, found.dataset.digest) == ("web", "f" * 8)
    assert json.loads(found.dataset.source) == record.source
    assert json.loads(found.dataset.profile) == {"tokens": 7, "fingerprint": record.digest}
    assert [(tag.key, tag.value) for tag in found.tags] == [("mlflow.data.context", "training")]


def test_resume_appends_metrics_and_keeps_parameters(save_dir):
    first = MLFlowLogger(save_dir=str(save_dir), tags={"layout": "t2"})
    first.log_hyperparams({"learning_rate": 1.0})
    first.log_metrics({"loss": 2.0}, 1)
    first.finalize("success")
    second = MLFlowLogger(save_dir=str(save_dir), run_id=first.run_id, tags={"layout": "t4"})
    with pytest.warns(
        UserWarning,
        match=r"continues with changed parameters.*keeps the first values: learning_rate was 1.0 and is now 5.0$",
    ):
        # MLflow itself raises on a changed parameter
        second.log_hyperparams({"learning_rate": 5.0, "new": 1})
    run = client_of(second).get_run(first.run_id)
    assert run.info.status == "RUNNING"
    assert run.data.params == {"learning_rate": "1.0", "new": "1"}
    assert run.data.tags["layout"] == "t4"
    second.log_metrics({"loss": 1.0}, 2)
    second.finalize("failed")
    assert history(second, "loss") == [(1, 2.0), (2, 1.0)]
    assert client_of(second).get_run(first.run_id).info.status == "FAILED"


def test_fit_of_started_processes_and_test_share_a_run(save_dir):
    started, main = (
        Trainer(
            strategy="ptdp_fork",
            accelerator="cpu",
            devices=2,
            logger=MLFlowLogger(save_dir=str(save_dir)),
        )
        for _ in range(2)
    )
    run_id = started.logger.run_id
    started.logger.log_metrics({"loss": 1.0}, 0)
    started.logger.finalize("success")
    extra = started.strategy.launcher.get_extra_results(started)
    main.strategy.launcher.update_main_process_results(main, extra)
    assert main.logger.run_id == run_id
    assert main.logger.experiment.get_run(run_id).info.status == "FINISHED"
    main.logger.log_metrics({"loss": 2.0}, 1)
    main.logger.finalize("success")
    assert history(main.logger, "loss") == [(0, 1.0), (1, 2.0)]


def test_unknown_run_id_is_refused(save_dir):
    with pytest.raises(ValueError, match=r"run_id='nothing'.*Leave run_id out"):
        MLFlowLogger(save_dir=str(save_dir), run_id="nothing").log_metrics({"loss": 1.0}, 0)


def test_resume_continues_run_of_checkpoint(save_dir):
    first = MLFlowLogger(save_dir=str(save_dir))
    run_id = first.run_id
    first.finalize("failed")
    home = save_dir / "lightning-ptdp"
    second = MLFlowLogger(save_dir=str(save_dir))
    assert not second.continue_run_of(save_dir / "elsewhere" / "x" / "checkpoints" / "last.ckpt")
    assert second.continue_run_of(home / run_id / "checkpoints" / "last.ckpt")
    assert not second.continue_run_of(home / "other" / "checkpoints" / "last.ckpt"), (
        "a logger must keep the run it has"
    )
    second.log_metrics({"loss": 1.0}, 1)
    assert second.run_id == run_id
    client_of(first).delete_run(run_id)
    for gone in (run_id, "nothing"):
        third = MLFlowLogger(save_dir=str(save_dir))
        assert third.continue_run_of(home / gone / "checkpoints" / "last.ckpt")
        with pytest.warns(UserWarning, match=rf"A new run is started instead of {gone}"):
            assert third.run_id not in (run_id, "nothing")
        third.finalize("success")
    with pytest.raises(ValueError, match=rf"run_id='{run_id}' cannot be resumed \(.*deleted"):
        MLFlowLogger(save_dir=str(save_dir), run_id=run_id).log_metrics({"loss": 1.0}, 0)


@pytest.mark.filterwarnings("ignore:logging failed")
def test_unwritten_metrics_are_kept_in_file(save_dir, monkeypatch):
    monkeypatch.setattr(mlflow, "LIMIT_S", 0.0)
    logger = MLFlowLogger(save_dir=str(save_dir))
    run_id = logger.run_id

    def away(*args):
        raise ConnectionError("the server is away")

    logger._open().writer = BackgroundWriter(away)
    logger.log_metrics({"loss": 1.5, "lr": 0.1}, 3)
    with pytest.warns(
        UserWarning, match=r"2 metrics that it did not accept are kept in .*the server is away"
    ):
        logger.finalize("success")
    rows = [
        json.loads(line)
        for line in (save_dir / "lightning-ptdp" / run_id / "unwritten_metrics.jsonl")
        .read_text()
        .splitlines()
    ]
    assert [(row["key"], row["value"], row["step"]) for row in rows] == [
        ("loss", 1.5, 3),
        ("lr", 0.1, 3),
    ]


@contextlib.contextmanager
def _largest_file(size):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.filterwarnings("ignore:logging failed")
@pytest.mark.parametrize("kind", ["sqlite", "disk"])
def test_full_disk_does_not_fail_finished_training(save_dir, monkeypatch, kind):
    monkeypatch.setattr(mlflow, "LIMIT_S", 0.0)
    logger = MLFlowLogger(save_dir=str(save_dir), log_model=True)
    kept = save_dir / "lightning-ptdp" / logger.run_id / "unwritten_metrics.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_text("before\n")

    def full(*args):
        if kind == "sqlite":
            raise sqlite3.OperationalError("database or disk is full")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    logger._open().writer = BackgroundWriter(full)
    monkeypatch.setattr(logger._open().inner, "after_save_checkpoint", full)
    with pytest.warns(
        UserWarning, match=r"a checkpoint was not copied to run .*(full|No space left)"
    ):
        logger.after_save_checkpoint(None)
    for step in (3, 4):
        logger.log_metrics({"loss": 1.5, "lr": 0.1}, step)
    lost = r"4 metrics are lost.*File too large.*: loss, lr of steps 3 to 4: .*(full|No space left)"
    with _largest_file(kept.stat().st_size + 20), pytest.warns(UserWarning, match=lost):
        logger.finalize("success")
    assert kept.read_text() == "before\n", "a partial row is left in the file"


def test_metrics_are_written_during_a_step_that_acts_as_another_rank(save_dir):
    logger = MLFlowLogger(save_dir=str(save_dir))
    writer = logger._open().writer
    rank_zero_only.rank = 1  # as in a step on a pipeline stage before the last one
    writer.put(Metric("loss", 1.0, 0, 0))
    writer.run(lambda: None, limit_s=60.0)
    rank_zero_only.rank = 0
    assert history(logger, "loss") == [(0, 1.0)]


def test_copies_of_logger_do_not_share_connection(save_dir):
    logger = MLFlowLogger(save_dir=str(save_dir))
    logger.log_metrics({"loss": 1.0}, 0)
    for twin in (copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))):
        twin.log_metrics({"loss": 2.0}, 1)
        twin.finalize("success")
        assert twin.run_id == logger.run_id
    logger.finalize("success")
    assert (1, 2.0) in history(logger, "loss")


def _log_on_every_rank(rank, save_dir):
    rank_zero_only.rank = rank
    logger = MLFlowLogger(save_dir=save_dir)
    for step in range(50):
        logger.log_metrics({"loss": float(rank)}, step)
    logger.experiment.set_tag(logger.run_id, "rank", str(rank))
    logger.log_hyperparams({"rank": rank})
    logger.finalize("success")
    return logger.run_id


def test_only_rank_zero_logs_to_fresh_store(pool, tmp_path):
    run_ids = pool.run(_log_on_every_rank, world_size=4, args=(str(tmp_path / "runs"),))
    assert run_ids[0] is not None
    assert run_ids[1:] == [None, None, None]
    logger = MLFlowLogger(save_dir=str(tmp_path / "runs"), run_id=run_ids[0])
    assert history(logger, "loss") == [(step, 0.0) for step in range(50)]
    run = client_of(logger).get_run(run_ids[0])
    assert (run.data.params["rank"], run.data.tags["rank"]) == ("0", "0")
    assert len(client_of(logger).search_runs([run.info.experiment_id])) == 1


def _begin(rank, save_dir):
    rank_zero_only.rank = 0
    import mlflow as _  # noqa: F401 - slow, so imported before the barrier

    dist.barrier()
    logger = MLFlowLogger(save_dir=save_dir)
    logger.log_metrics({"loss": float(rank)}, 0)
    logger.finalize("success")
    assert logger.run_id is not None
    return logger.run_id


def test_concurrent_runs_share_fresh_store(pool, tmp_path):
    run_ids = pool.run(_begin, world_size=3, args=(str(tmp_path / "runs"),))
    client = client_of(MLFlowLogger(save_dir=str(tmp_path / "runs")))
    runs = [client.get_run(run_id) for run_id in run_ids]
    assert [run.data.metrics["loss"] for run in runs] == [0.0, 1.0, 2.0]
    assert len({run.info.experiment_id for run in runs}) == 1


def _log_and_break(logger, queue):
    logger.log_metrics({"loss": 3.0}, 7)
    queue.put(logger.run_id)
    sys.exit(1)


def test_failed_forked_worker_leaves_failed_run_with_metrics(save_dir):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    logger = MLFlowLogger(save_dir=str(save_dir))
    logger.log_metrics({"parent": 1.0}, 0)  # the worst case: the parent is connected when it forks
    worker = context.Process(target=_log_and_break, args=(copy.deepcopy(logger), queue))
    worker.start()
    run_id = queue.get()
    worker.join(60)
    assert client_of(logger).get_run(run_id).info.status == "FAILED"
    assert history(logger, "loss") == [(7, 3.0)]
    logger.finalize("success")
    assert history(logger, "parent") == [(0, 1.0)]


def test_sigterm_while_a_run_ends_waits_for_its_end(save_dir, monkeypatch):
    """torch's launcher sends it to rank 0 if another rank has ended first after Ctrl-C."""
    logger = MLFlowLogger(save_dir=save_dir)
    logger.log_metrics({"loss": 3.0}, 7)
    order = []
    terminated = threading.Event()
    end = LightningMLFlowLogger.finalize

    def interrupted(inner, status):
        os.kill(os.getpid(), signal.SIGTERM)
        terminated.wait(timeout=0.3)
        end(inner, status)
        order.append("end of the run")

    def terminate(number, _frame):
        order.append(number)
        terminated.set()

    monkeypatch.setattr(LightningMLFlowLogger, "finalize", interrupted)
    with handled(signal.SIGTERM, terminate):
        logger.finalize("success")
    assert order == ["end of the run", signal.SIGTERM]
    assert client_of(logger).get_run(logger.run_id).info.status == "FINISHED"


@pytest.mark.parametrize(
    "kind", ["folder is a file", "database is text", "database is a folder", "no server"]
)
def test_unusable_store_is_refused(tmp_path, kind):
    (tmp_path / "text").write_text("hello, I am not a database")
    options = {
        "folder is a file": {"save_dir": str(tmp_path / "text" / "runs")},
        "database is text": {
            "save_dir": str(tmp_path),
            "tracking_uri": f"sqlite:///{tmp_path / 'text'}",
        },
        "database is a folder": {
            "save_dir": str(tmp_path),
            "tracking_uri": f"sqlite:///{tmp_path}",
        },
        "no server": {"save_dir": str(tmp_path), "tracking_uri": "http://127.0.0.1:9"},
    }
    logger = MLFlowLogger(**options[kind])
    with pytest.raises(ValueError, match=r"(save_dir|tracking_uri)='"):
        logger.check()
    with pytest.raises(ValueError, match=r"(save_dir|tracking_uri)='"):
        logger.log_metrics({"loss": 1.0}, 0)
    trainer = Trainer(strategy="ptdp_fork", accelerator="cpu", devices=2, logger=logger)
    with pytest.raises(ValueError, match=r"(save_dir|tracking_uri)='"):
        trainer.fit(BoringModel())


def test_system_metrics_continue_step_count_on_resume(save_dir, monkeypatch):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    run_id, steps = None, []
    for _ in range(2):
        logger = MLFlowLogger(save_dir=str(save_dir), run_id=run_id, log_system_metrics=True)
        run_id, name = logger.run_id, "system/cpu_utilization_percentage"
        seen, deadline = len(steps), time.monotonic() + 60
        while len(history(logger, name)) <= seen:
            assert time.monotonic() < deadline
        assert pickle.loads(pickle.dumps(logger)).tracking_uri == logger.tracking_uri
        logger.finalize("success")
        assert not any(thread.name == "SystemMetricsMonitor" for thread in threading.enumerate())
        steps = [step for step, _ in history(logger, name)]
    assert steps == list(range(len(steps)))
