"""Recording of training steps with a real Trainer."""

import csv
import inspect
import json
import logging
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_ptdp.callbacks import PipelineTimeline
from lightning_ptdp.loggers import MLFlowLogger as OurLogger
from tests.conformance.toys import LitNet, Place, loader, make_trainer

pytestmark = pytest.mark.thorough

P2 = {"pipeline_parallel_size": 2, "num_microbatches": 4}


class MLFlowLogger(DummyLogger):
    """A logger that records files like MLflow's logger."""

    run_id = "r1"

    def __init__(self):
        super().__init__()
        self.kept = []

    @property
    def experiment(self):
        return self

    def log_artifact(self, run_id, path, folder):
        self.kept.append((run_id, Path(path).name, folder))


class Members(L.Callback):
    """Records the number of step observers at the end of each training batch."""

    def __init__(self):
        self.counts = []

    def on_train_batch_end(self, trainer, *_):
        self.counts.append(len(trainer.strategy.observers._members))


def _fit(rank, world_size, layout, folder, options, accumulate):
    store, members = MLFlowLogger(), Members()
    trainer = make_trainer(
        Place(world_size=world_size, layout=layout),
        callbacks=[members, PipelineTimeline(**options)],
        logger=[CSVLogger(folder), store],
        default_root_dir=folder,
        accumulate_grad_batches=accumulate,
        max_epochs=1,
    )
    torch.manual_seed(0)
    trainer.fit(LitNet(), loader())
    return store.kept, members.counts


def _metrics(folder):
    """Return the timeline metrics of the recorded steps, by step."""
    (file,) = folder.rglob("metrics.csv")
    rows = csv.DictReader(file.read_text().splitlines())
    return {
        int(row["step"]): {
            name: float(value) for name, value in row.items() if name.startswith("timeline/")
        }
        for row in rows
        if row["timeline/overhead"]
    }


def _times(trace):
    """Return step time and bubble of both timelines in a trace of two ranks without reductions."""
    found = []
    for pid in (0, 1):
        spans = [
            e
            for e in json.loads(trace.read_text())["traceEvents"]
            if e["ph"] == "X" and e["pid"] == pid
        ]
        whole = max(e["ts"] + e["dur"] for e in spans) - min(e["ts"] for e in spans)
        busy = sum(e["dur"] for e in spans)
        found.append((whole / 1e6, (2 * whole - busy) / busy))
    return found


def test_selected_steps_are_recorded(pool, tmp_path):
    results = pool.run(_fit, world_size=2, args=(2, P2, str(tmp_path), {"steps": [0, 2]}, 1))
    files = ["step-000000.json", "step-000000.png", "step-000002.json", "step-000002.png"]
    (folder,) = tmp_path.rglob("timeline")
    assert folder.parent == tmp_path / "lightning_logs" / "version_0"
    assert sorted(path.name for path in folder.iterdir()) == files
    assert sorted(results[0][0]) == [("r1", name, "timeline") for name in files]
    assert results[1][0] == []
    # The watchdog always observes; the recorder observes recorded steps only.
    assert [counts for _, counts in results] == [[2, 1, 2, 1]] * 2
    metrics = _metrics(tmp_path)
    assert sorted(metrics) == [0, 2]
    for step, found in metrics.items():
        (measured, idle), (ideal, ideal_idle) = _times(folder / f"step-{step:06d}.json")
        assert found["timeline/step_seconds"] == pytest.approx(measured)
        assert found["timeline/overhead"] == pytest.approx(measured / ideal - 1)
        assert found["timeline/bubble_measured"] == pytest.approx(idle)
        assert found["timeline/bubble_ideal"] == pytest.approx(ideal_idle)


def test_unwritable_folder_does_not_abort_training(pool, tmp_path):
    (tmp_path / "taken").write_text("where no folder can be made")
    results = pool.run(
        _fit,
        world_size=2,
        args=(2, P2, str(tmp_path), {"steps": [0], "dirpath": str(tmp_path / "taken" / "x")}, 1),
    )
    assert [counts for _, counts in results] == [[2, 1, 1, 1]] * 2


def test_trace_holds_operations_of_every_rank(pool, tmp_path):
    layout = {**P2, "schedule": "zb_h1"}
    options = {"every_n_steps": 1, "dirpath": str(tmp_path / "mine")}
    results = pool.run(_fit, world_size=4, args=(4, layout, str(tmp_path), options, 1))
    # Ranks 0 and 2 form the pipeline of the first replica.
    assert [counts for _, counts in results] == [[1, 2], [1, 1]] * 2
    files = sorted((tmp_path / "mine").iterdir())
    assert [path.name for path in files] == ["step-000001.json", "step-000001.png"]
    events = json.loads(files[0].read_text())["traceEvents"]
    spans = [(e["pid"], e["tid"], e["name"]) for e in events if e["ph"] == "X"]
    expected = {(rank, f"{kind}{rank}.{i}") for rank in (0, 1) for kind in "FBW" for i in range(4)}
    for pid in (0, 1):
        assert {
            (tid // 2, name) for found, tid, name in spans if found == pid and name[0] != "R"
        } == expected
    assert {(tid // 2, name) for pid, tid, name in spans if pid == 0 and name[0] == "R"} == {
        (0, "R0"),
        (1, "R1"),
    }
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert titles == ["zb_h1, step 1, measured", "ideal: mean costs, free messages"]
    measured = {e["name"]: e for e in events if e["ph"] == "X" and e["pid"] == 0}
    assert measured["F1.0"]["ts"] >= measured["F0.0"]["ts"] + measured["F0.0"]["dur"] - 2e4
    assert measured["R0"]["ts"] >= measured["B0.3"]["ts"]


def test_accumulated_step_records_last_batch(pool, tmp_path):
    results = pool.run(_fit, world_size=2, args=(2, P2, str(tmp_path), {"steps": [1]}, 2))
    assert [name for _, name, _ in results[0][0]] == ["step-000001.png", "step-000001.json"]
    assert results[0][1] == [1, 1, 2, 2]


def _fit_alone(rank, folder, layout):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    # Both Lightning packages log through one module, to the logger of the package imported last.
    sources = [
        logging.getLogger(f"{name}.utilities.rank_zero")
        for name in ("lightning.pytorch", "pytorch_lightning")
    ]
    for source in sources:
        source.addHandler(handler)
    place = Place(layout=layout) if layout is not None else Place(reference="auto")
    make_trainer(place, callbacks=[PipelineTimeline(every_n_steps=1)], default_root_dir=folder).fit(
        LitNet(), loader()
    )
    for source in sources:
        source.removeHandler(handler)
    return [line for line in said if "PipelineTimeline" in line], [
        path.name for path in Path(folder).rglob("*.png")
    ]


@pytest.mark.parametrize("layout", [None, {}, {"num_microbatches": 2}])
def test_missing_pipeline_is_reported_once(pool, tmp_path, layout):
    ((said, files),) = pool.run(_fit_alone, world_size=1, args=(str(tmp_path), layout))
    assert said == ["PipelineTimeline records nothing, because there is no pipeline"]
    assert files == []


class _Fails(LitNet):
    """Fails on every rank, after the recorder was added and before the schedule starts."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            raise ZeroDivisionError("bad batch")


def _fail(rank, folder):
    callback = PipelineTimeline(every_n_steps=1)
    trainer = make_trainer(
        Place(world_size=2, layout=P2), callbacks=[callback], default_root_dir=folder
    )
    with pytest.raises(ZeroDivisionError):
        trainer.fit(_Fails(), loader())
    return callback._recorder is None, [path.name for path in Path(folder).rglob("step-*")]


def test_failed_step_is_not_recorded(pool, tmp_path):
    assert pool.run(_fail, world_size=2, args=(str(tmp_path),)) == [(True, [])] * 2


def test_mlflow_client_accepts_artifact_arguments():
    from mlflow import MlflowClient

    inspect.signature(MlflowClient.log_artifact).bind(None, "run id", "/a/file", "timeline")
    assert isinstance(OurLogger.run_id, property) and isinstance(OurLogger.experiment, property)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "every_n_steps=None and steps=None must not both be set or both be left out"),
        ({"every_n_steps": 2, "steps": [1]}, "Use one of them"),
        ({"every_n_steps": 0}, "every_n_steps=0 must be a positive integer"),
        ({"steps": []}, r"steps=\[\] must be one or more"),
        ({"steps": [3, -1]}, r"steps=\[3, -1\]"),
    ],
)
def test_invalid_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        PipelineTimeline(**options)
