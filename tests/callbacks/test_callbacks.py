"""Callbacks in a real Trainer, on one device and with Lightning's own strategies."""

import json
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_ptdp.callbacks import (
    GradientNorm,
    LayoutSummary,
    RunRecord,
    RunReport,
    SaveResolvedConfig,
    Throughput,
    TrainPerplexity,
    ValidateAtEnd,
)
from lightning_ptdp.callbacks.run_summary import StrategySummary
from lightning_ptdp.world.layout import ParallelLayout
from tests.callbacks.toys import BATCH, FLOPS, LENGTH, Tokens


class Keep(Callback):
    """Metrics logged before each training step and at the end of training.

    It also counts validations.
    """

    def __init__(self):
        self.steps = []
        self.validations = 0

    def on_train_batch_start(self, trainer, *_):
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_end(self, trainer, *_):
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_end(self, trainer, *_):
        self.validations += 1


def fit(tmp_path, *callbacks, **options):
    keep = Keep()
    settings = {
        "max_steps": 5,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[*callbacks, keep],
        **(settings | options),
    )
    torch.manual_seed(0)
    trainer.fit(Tokens())
    return keep


class Clock:
    """A clock that moves only when it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


class Work(Callback):
    """Advances the clock: 50 s for the first step, 2 s for later ones, 1000 s for validation."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.clock.now += 50.0 if trainer.global_step == 0 else 2.0

    def on_validation_batch_start(self, *_):
        self.clock.now += 1000.0


def test_throughput_excludes_first_step_and_validation(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    keep = fit(
        tmp_path,
        Work(clock),
        Throughput(window=3),
        max_steps=8,
        limit_val_batches=1,
        val_check_interval=2,
        check_val_every_n_epoch=None,
    )
    assert keep.validations == 4
    assert "tokens_per_s" not in keep.steps[1]
    for step in keep.steps[2:]:
        assert step["samples_per_s"] == pytest.approx(BATCH / 2)
        assert step["tokens_per_s"] == pytest.approx(BATCH * LENGTH / 2)
        assert step["model_tflops_per_s"] == pytest.approx(BATCH * LENGTH * FLOPS / 2 / 1e12)


def test_throughput_without_tokens_logs_samples_only(tmp_path):
    throughput = Throughput()
    logged = {}
    throughput.log = lambda name, value, **_: logged.update({name: value})
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    for _ in range(2):
        throughput.on_train_batch_end(
            trainer, Tokens(), None, [torch.zeros(3, 8), torch.zeros(3)], 0
        )
    assert set(logged) == {"samples_per_s"}


def test_throughput_rejects_zero_window():
    with pytest.raises(ValueError, match="window=0"):
        Throughput(window=0)


def test_gradient_norm_is_measured_before_clipping(tmp_path):
    seen = []

    class Expect(Callback):
        def on_before_optimizer_step(self, trainer, module, *_):
            seen.append(float(torch.linalg.vector_norm(module.table.weight.grad)))

    keep = fit(tmp_path, Expect(), GradientNorm(), gradient_clip_val=1e-3, max_steps=3)
    assert [step["grad_norm"] for step in keep.steps[1:]] == pytest.approx(seen)
    assert min(seen) > 1e-2


def test_train_perplexity(tmp_path):
    keep = fit(tmp_path, TrainPerplexity())
    for step in keep.steps[1:]:
        assert step["train_perplexity"] == pytest.approx(
            torch.tensor(step["train_loss"]).exp().item()
        )


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_steps": 5}, 2),
        ({"max_steps": 6}, 2),
        ({"max_steps": -1, "max_epochs": 1, "limit_train_batches": 7}, 3),
    ],
)
def test_final_validation_runs_once_after_last_step(tmp_path, limits, expected):
    assert (
        fit(
            tmp_path, ValidateAtEnd(), limit_val_batches=1, val_check_interval=3, **limits
        ).validations
        == expected
    )


def test_config_is_saved_and_never_overwritten(tmp_path):
    for text in ("a: 1\n", "a: 1\n", "a: 2\n"):
        fit(tmp_path, SaveResolvedConfig(text), max_steps=1)
    assert {path.name: path.read_text() for path in tmp_path.glob("*.yaml")} == {
        "config.yaml": "a: 1\n",
        "config-1.yaml": "a: 2\n",
    }


def test_config_is_saved_next_to_logs(tmp_path):
    fit(
        tmp_path,
        SaveResolvedConfig("a: 1\n"),
        max_steps=1,
        logger=CSVLogger(tmp_path, name="exp", version=7),
    )
    assert (tmp_path / "exp" / "version_7" / "config.yaml").read_text() == "a: 1\n"


def test_run_report_lists_checkpoints_and_scores(tmp_path, capsys):
    file = tmp_path / "record.json"
    checkpoints = ModelCheckpoint(
        tmp_path / "checkpoints", monitor="val_loss", save_last=True, filename="best"
    )
    fit(
        tmp_path,
        RunReport(str(file)),
        ValidateAtEnd(),
        checkpoints,
        max_steps=2,
        limit_val_batches=1,
        val_check_interval=2,
        enable_checkpointing=True,
    )
    record = RunReport.read(str(file))
    assert record == RunRecord(
        folder=str(tmp_path),
        checkpoint=str(tmp_path / "checkpoints" / "last.ckpt"),
        best_checkpoint=str(tmp_path / "checkpoints" / "best.ckpt"),
        monitor="val_loss",
        best_score=record.validation["val_loss"],
        validation=record.validation,
        finished=True,
    )
    out = capsys.readouterr().out
    assert f"checkpoint:  {record.checkpoint}" in out
    assert f"val_loss:    {record.best_score:.4g}\n" in out
    assert f"best:        {record.best_checkpoint} (val_loss {record.best_score:.4g})" in out


def test_run_report_marks_failed_run_unfinished(tmp_path):
    class Break(Callback):
        def on_train_batch_end(self, *_):
            raise RuntimeError("broken")

    file = tmp_path / "record.json"
    assert RunReport.read(str(file)) is None
    with pytest.raises(RuntimeError, match="broken"):
        fit(tmp_path, RunReport(str(file)), Break())
    assert json.loads(file.read_text())["finished"] is False


def test_run_report_of_fast_dev_run_names_no_run(tmp_path):
    """Lightning's stand-in for a logger has every attribute."""
    file = tmp_path / "record.json"
    fit(tmp_path, RunReport(str(file)), logger=CSVLogger(tmp_path), fast_dev_run=True)
    record = RunReport.read(str(file))
    assert (record.finished, record.tracking_uri, record.run_id, record.url) == (True, "", "", "")


class MLFlowLogger(CSVLogger):
    """A logger with the tag and text methods of Lightning's MLflow logger."""

    run_id = "r1"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tags = {}
        self.texts = {}

    @property
    def experiment(self):
        return self

    def set_tag(self, run_id, name, value):
        self.tags[name] = value

    def log_text(self, run_id, text, artifact_file):
        self.texts[artifact_file] = text

    def log_metrics(self, *_, **__): ...

    def save(self): ...


def test_layout_summary_is_printed_once_and_logged(tmp_path, capsys):
    logger = MLFlowLogger(tmp_path)

    class Describe(Callback):
        def setup(self, trainer, *_, **__):
            layout = ParallelLayout(world_size=1)
            trainer.strategy.summary = lambda: StrategySummary(
                layout=layout, schedule="none", num_microbatches=1
            )

    fit(tmp_path, Describe(), LayoutSummary(), logger=logger)
    assert capsys.readouterr().out.count("layout    1 process") == 1
    assert logger.texts["layout.txt"].startswith("layout    1 process")
    assert (logger.tags["layout"], logger.tags["tensor_parallel_size"]) == ("t1 p1 d1", 1)


def test_layout_summary_ignores_other_strategies(tmp_path, capsys):
    fit(tmp_path, LayoutSummary())
    assert "layout" not in capsys.readouterr().out
