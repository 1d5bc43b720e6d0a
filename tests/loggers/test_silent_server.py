"""MLflow servers that accept connections but never answer, and unknown tracking URIs."""

import http.server
import json
import os
import socket
import threading
from contextlib import contextmanager
from typing import Any

import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_ptdp.loggers import MLFlowLogger, connection
from lightning_ptdp.loggers import mlflow as ours
from lightning_ptdp.loggers.tracking_store import SilentServerError, check_store


@pytest.fixture(autouse=True)
def rank_zero(monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 0)


@pytest.fixture
def silent():
    """Yield the address of a server that accepts connections but never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_unresponsive_server_is_detected_within_timeout(silent):
    for uri in (silent, f"{silent}/prefix/", silent.replace("http:", "https:")):
        with pytest.raises(
            SilentServerError, match=r"accepts connections but does not answer within 0\.2 s"
        ):
            check_store(uri, timeout_s=0.2)


def test_training_continues_without_unresponsive_server(silent, tmp_path, monkeypatch):
    _impatient(monkeypatch)
    monkeypatch.setattr(ours, "connect", lambda *_, **__: pytest.fail("MLflow itself was asked"))
    logger = MLFlowLogger(
        save_dir=str(tmp_path), tracking_uri=silent, log_model=True, log_system_metrics=True
    )
    logger.check()
    with pytest.warns(
        UserWarning,
        match=r"continues without the MLflow server. Metrics are kept in "
        r".*unwritten_metrics\.jsonl",
    ):
        logger.log_hyperparams({"a": 1})
    for step in range(3):
        logger.log_metrics({"loss": 1.5 + step}, step)
    logger.log_text("hello", "note.txt")
    logger.log_table({"a": [1]}, "table.json")
    logger.experiment.set_tag(logger.run_id, "a", "b")
    logger.after_save_checkpoint(Any)
    logger.finalize("success")
    kept = tmp_path / logger.name / str(logger.run_id) / "unwritten_metrics.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(row["key"], row["value"], row["step"]) for row in rows] == [
        ("loss", 1.5 + step, step) for step in range(3)
    ]
    assert logger.url == str(kept)


def test_training_continues_if_only_health_check_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with _healthy_and_silent() as uri:
        for run_id in (None, "0123"):
            logger = MLFlowLogger(save_dir=str(tmp_path), tracking_uri=uri, run_id=run_id)
            with pytest.warns(UserWarning, match="continues without the MLflow server"):
                logger.log_metrics({"loss": 1.0}, 0)
            logger.finalize("success")
            assert (
                tmp_path / logger.name / str(logger.run_id) / "unwritten_metrics.jsonl"
            ).exists()
            assert run_id in (None, logger.run_id)


def test_request_timeout_defaults_keep_user_settings(monkeypatch):
    for name in connection._DEFAULTS:
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    connection.set_defaults()
    from mlflow import environment_variables as theirs

    assert theirs.MLFLOW_HTTP_REQUEST_TIMEOUT.get() == 7
    assert theirs.MLFLOW_HTTP_REQUEST_MAX_RETRIES.get() == 1
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT")
    connection.set_defaults()
    assert int(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]) == connection.LIMIT_S


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        (
            "htp://127.0.0.1:5000",
            r"MLflow has no store htp:; did you mean 'http'\? \(use http://HOST:PORT, sqlite:///FILE",
        ),
        ("htp:/x", "MLflow has no store htp:"),
        ("redis://h", "MLflow has no store redis:"),
        ("sqlite:mlflow.db", "names no file. Use sqlite:///FILE"),
        ("http://127.0.0.1:99999", "no MLflow server answers at 127.0.0.1:99999"),
    ],
)
def test_unknown_tracking_uri_is_refused_before_launch(tmp_path, uri, words):
    with pytest.raises(ValueError, match=rf"tracking_uri='{uri}'.*{words}"):
        MLFlowLogger(save_dir=str(tmp_path), tracking_uri=uri).check()


@pytest.mark.parametrize(
    "uri",
    [
        "runs/mlruns",
        "/abs/mlruns",
        "file:///abs",
        "postgresql+psycopg2://u:p@h/db",
        "databricks",
        "databricks://profile",
        "uc:x",
    ],
)
def test_other_mlflow_stores_are_not_checked(tmp_path, uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    MLFlowLogger(save_dir=str(tmp_path), tracking_uri=uri).check()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("uri", ["mlruns", "", "runs/mlruns", "/abs/mlruns", "file:///abs"])
def test_folder_is_refused_if_mlflow_refuses_it(tmp_path, uri, monkeypatch):
    from mlflow import environment_variables as theirs

    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    if not hasattr(theirs, "MLFLOW_ALLOW_FILE_STORE"):
        return  # an earlier version supports folders
    with pytest.raises(ValueError, match="no longer supports folders"):
        MLFlowLogger(save_dir=str(tmp_path), tracking_uri=uri).check()


def _impatient(monkeypatch):
    monkeypatch.setattr(ours, "check_store", lambda uri: check_store(uri, timeout_s=0.2))


def test_refusal_of_a_server_names_the_credentials(tmp_path):
    with _healthy(lambda handler: handler.send_error(401)) as uri:
        logger = MLFlowLogger(save_dir=str(tmp_path), tracking_uri=uri)
        logger.check()
        words = rf"tracking_uri='{uri}': MLflow creates no run \(.*401.*MLFLOW_TRACKING_USERNAME"
        with pytest.raises(ValueError, match=f"(?s){words}"):
            logger.log_metrics({"loss": 1.0}, 0)


@contextmanager
def _healthy_and_silent():
    """Run a server that answers ``/health`` and blocks all other requests until the end."""
    over = threading.Event()
    with _healthy(lambda handler: over.wait()) as uri:
        try:
            yield uri
        finally:
            over.set()


@contextmanager
def _healthy(answer):
    """Run a server that answers ``/health``, and calls ``answer`` for all other requests."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.do_GET()

        def do_GET(self):
            if not self.path.endswith("/health"):
                answer(self)
                return
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_server_behind_proxy_is_not_checked(monkeypatch, variable):
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    check_store("http://mlflow.invalid:5000")
    monkeypatch.setenv("no_proxy", "mlflow.invalid")
    with pytest.raises(ValueError, match=r"no MLflow server answers at mlflow\.invalid:5000"):
        check_store("http://mlflow.invalid:5000")
