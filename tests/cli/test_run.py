"""fit, prepare, validate and generate on a tiny corpus."""

import json
import re
import shutil
import signal
import zipfile
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from lightning_ptdp.checkpoint import read_metadata, verify_checkpoint
from lightning_ptdp.cli.lightning_cli import PTDPCLI
from tests.cli.commands import PTDP
from tests.scripts import forked_session

pytestmark = pytest.mark.thorough


LOGGED = {
    "train/loss",
    "train/perplexity",
    "train/grad_norm",
    "train/learning_rate",
    "val/loss",
    "val/perplexity",
    "system/tokens_per_s",
    "system/samples_per_s",
    "system/model_tflops_per_s",
}


def only_run(folder):
    (found,) = (folder / "runs" / "tiny").iterdir()
    return found


def mlflow_run(folder, run_id):
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{folder / 'runs' / 'mlflow.db'}").get_run(run_id)


@pytest.mark.parametrize("layout", [[], PTDP], ids=["one process", "t2 p2 v2"])
def test_fit_validate_and_generate(ptdp, config, tmp_path, layout):
    code, out, err = ptdp("fit", "--config", config, *layout)
    assert code == 0, err
    run = only_run(tmp_path)
    checkpoint = run / "checkpoints" / "last.ckpt"
    (sample,) = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    assert (sample["step"], sample["prompt"], sample["text"][:9]) == (4, "the stage", "the stage")
    if not layout:  # pytest captures the output of this process only
        assert f"sample at step 4 ('the stage'):\n{sample['text']}\n" in out
        assert f"checkpoint:  {checkpoint}" in out
        assert re.search(rf"MLflow run:  http://\S+/#/experiments/\d+/runs/{run.name}\?", out)

    tracked = mlflow_run(tmp_path, run.name)
    assert tracked.info.status == "FINISHED"
    assert set(tracked.data.metrics) >= LOGGED
    if layout:
        assert tracked.data.tags["mlflow.note.content"].startswith("tiny\n\n```text\n")
    assert tracked.data.params["config.hidden_size"] == "32"
    assert tracked.data.tags["checkpoint"] == str(checkpoint)
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_steps"] == 4
    artifacts = {
        path.name for path in Path(tracked.info.artifact_uri.removeprefix("file://")).iterdir()
    }
    assert artifacts >= {"config.yaml", "samples.json"}
    assert [entry.dataset.name for entry in tracked.inputs.dataset_inputs] == ["data"] * 2
    assert (tracked.data.params["trainer.max_steps"], tracked.info.run_name[:5]) == ("4", "tiny ")
    if layout:
        assert tracked.data.tags["layout"] == "t2 p2 v2 d1"
        assert "layout.txt" in artifacts

    options = ["--prompt", "a rank", "--max_new_tokens", "5", "--seed", "3"]
    code, written, err = ptdp("generate", "--checkpoint", str(checkpoint), *options)
    assert (code, written[:6]) == (0, "a rank"), err
    assert ptdp("generate", "--checkpoint", str(checkpoint), *options)[1] == written
    code, _, err = ptdp("validate", "--config", config, *layout, "--ckpt_path", str(checkpoint))
    assert code == 0, err


def test_epoch_without_validation_is_refused_before_start(ptdp, config, monkeypatch):
    monkeypatch.setattr("lightning_ptdp.cli.run._fit", lambda *_: pytest.fail("started"))
    code, _, err = ptdp(
        "fit",
        "--config",
        config,
        "--trainer.val_check_interval=9999",
        "--trainer.check_val_every_n_epoch=1",
    )
    assert (code, "=9999 is longer than an epoch" in err.splitlines()[-1]) == (2, True), err


def test_resumed_run_keeps_folder_and_new_run_gets_its_own(ptdp, config, tmp_path):
    first = ["--trainer.max_steps=2", "--sample=null"]
    assert ptdp("fit", "--config", config, *first)[0] == 0
    run = only_run(tmp_path)
    resumed = [
        "--ckpt_path",
        str(run / "checkpoints" / "last.ckpt"),
        f"--trainer.logger.run_id={run.name}",
        "--sample=null",
    ]
    code, _, err = ptdp("fit", "--config", config, *resumed)
    assert code == 0, err
    assert only_run(tmp_path) == run
    assert {path.name for path in run.glob("*.yaml")} == {"config.yaml", "config-1.yaml"}
    assert mlflow_run(tmp_path, run.name).info.status == "FINISHED"
    assert ptdp("fit", "--config", config, *first)[0] == 0
    assert len(list((tmp_path / "runs" / "tiny").iterdir())) == 2


def test_fit_without_logger_writes_no_run_folder(ptdp, config, tmp_path):
    shutil.rmtree(tmp_path / "runs")
    code, said, err = ptdp(
        "fit", "--config", config, "--trainer.logger=false", "--trainer.max_steps=1"
    )
    assert code == 0, err
    assert "checkpoint:" in said
    assert not (tmp_path / "runs").exists()


def test_configured_callback_replaces_that_of_every_fit(config):
    callbacks = ["Goodput", "SaveOnSignal"]
    options = [f"--trainer.callbacks+={name}" for name in callbacks]
    cli = PTDPCLI("fit", ["--config", config, *options, "--trainer.callbacks.name=mine.ckpt"])
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert [names.count(name) for name in callbacks] == [1, 1]


def test_print_config_round_trip(ptdp, config, tmp_path):
    code, printed, _ = ptdp(
        "fit",
        "--config",
        config,
        "--model.config.num_layers",
        "6",
        "--sample",
        "null",
        "--print_config",
    )
    assert code == 0
    assert yaml.safe_load(printed)["model"]["init_args"]["config"]["num_layers"] == 6
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    assert ptdp("fit", "--config", str(again), "--print_config")[1] == printed


def test_prepare_reports_progress_and_reuses_data(ptdp, config, tmp_path):
    where = f"--data.data_dir={tmp_path / 'data'}"
    code, out, err = ptdp("prepare", "--config", config, where)
    assert code == 0, err
    assert "learning a vocabulary of 320 pieces" in out
    assert (tmp_path / "data" / "manifest.json").exists()
    assert "found" in ptdp("prepare", "--config", config, where)[1]


MISTAKES = [
    (["--model.config.num_heads=5"], ["hidden_size=32", "num_heads=5"]),
    (
        ["--data.sequence_length=32"],
        ["model.config.sequence_length=16", "--model.config.sequence_length 32"],
    ),
    (["--data.vocabulary_size=400"], ["model.config.vocabulary_size=320"]),
    (["--data.source=/no/where", "--data.data_dir=new"], ["/no/where"]),
    (
        ["--data.data_dir=new", "--trainer.logger.tracking_uri=sqlite:///tiny.yaml"],
        ["tracking_uri", "not an SQLite database"],
    ),
    (["--data=null"], ["there is no data: --data is not set, and LitGPT has no train_dataloader"]),
    (["--trainer.default_root_dir=tiny.yaml"], ["trainer.default_root_dir"]),
    ([*PTDP, "--model.config.num_heads=1"], ["num_heads=1", "tensor_parallel_size"]),
    ([*PTDP, "--model.config.num_layers=3"], ["3 ", "layers"]),
    (
        [*PTDP, "--data.micro_batch_size=1", "--data.num_microbatches=2"],
        ["num_microbatches=4", "2"],
    ),
]


@pytest.mark.parametrize(
    ("arguments", "words"), MISTAKES, ids=[" ".join(m[0][-1:]) for m in MISTAKES]
)
def test_invalid_option_is_refused_before_any_write(
    ptdp, config, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code, _, err = ptdp("fit", "--config", config, *arguments)
    assert code == 2, err
    assert "Traceback" not in err
    for word in words:
        assert word in err.splitlines()[-1]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("kind", ["missing", "not a checkpoint", "packed"])
def test_generate_refuses_invalid_checkpoint(ptdp, tmp_path, kind):
    path = tmp_path / "last.ckpt"
    if kind == "not a checkpoint":
        torch.save({"state_dict": {}}, path)
    if kind == "packed":
        torch.save({"state_dict": {"w": torch.zeros(2)}}, tmp_path / "as torch writes it")
        with (
            zipfile.ZipFile(tmp_path / "as torch writes it") as plain,
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed,
        ):
            for name in plain.namelist():
                packed.writestr(name, plain.read(name))
    code, _, err = ptdp("generate", "--checkpoint", str(path))
    assert code == 2
    assert "--checkpoint" in err
    assert (kind == "packed") == ("which torch.save does not write" in err)
    assert "Traceback" not in err


ENDLESS = [
    *PTDP,
    "--trainer.devices=2",
    "--trainer.strategy.tensor_parallel_size=1",
    "--trainer.max_steps=1000000",
    "--trainer.val_check_interval=1000000",
    "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: {every_n_train_steps: 2, "
    "save_top_k: 1, monitor: null}}",
]


@contextmanager
def endless_fit(config, tmp_path):
    """A training that has saved a checkpoint and goes on."""
    with forked_session(
        ["lightning_ptdp", "fit", "--config", config, *ENDLESS], folder=tmp_path
    ) as fit:
        fit.wait_until(
            lambda: list(tmp_path.glob("runs/tiny/*/checkpoints/latest")), "a checkpoint"
        )
        yield fit


@pytest.mark.parametrize(("sent", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_saves_checkpoint_and_ends_all_processes(config, tmp_path, sent, expected):
    with endless_fit(config, tmp_path) as fit:
        assert len(fit.alive) >= 3
        fit.process.send_signal(sent)
        assert fit.finish(60) == expected, fit.output
    run = only_run(tmp_path)
    assert mlflow_run(tmp_path, run.name).info.status == "KILLED"
    assert "training ended early" in fit.output
    verify_checkpoint(run / "checkpoints" / "on_signal.ckpt")
    assert f"saved {run}/checkpoints/on_signal.ckpt" in fit.output


def test_killed_rank_ends_run_with_short_error(config, tmp_path):
    with endless_fit(config, tmp_path) as fit:
        psutil.Process(fit.process.pid).children()[1].kill()
        assert fit.finish(60) == 1, fit.output
    last = fit.output.splitlines()[-1]
    assert last.startswith("ptdp: process "), fit.output
    assert "SIGKILL" in last
    assert "frame #" not in fit.output


def test_resume_auto_continues_run_and_init_from_starts_one(ptdp, config, tmp_path):
    arguments = [
        "fit",
        "--config",
        config,
        "--trainer.strategy=ptdp",
        "--sample=null",
        "--resume=auto",
    ]
    result = ptdp(*arguments, "--trainer.max_steps=2")
    assert result[0] == 0, result[2]
    run = only_run(tmp_path)
    latest = run / "checkpoints" / "latest"
    assert read_metadata(latest).run["global_step"] == 2
    code, _, err = ptdp(
        *arguments[:-1], "--ckpt_path", str(latest), "--model.config.hidden_size=64"
    )
    assert (code, "has the shape" in err, "rank" in err) == (2, True, False), err
    kept = latest.resolve()
    shard = next(kept.glob("rank*.safetensors")).name
    (kept / shard).rename(tmp_path / shard)
    strict = ["--trainer.strategy=PTDPStrategy", "--trainer.strategy.on_damage=refuse"]
    code, _, err = ptdp("fit", "--config", config, *strict, "--ckpt_path", str(kept))
    assert (code, shard in err, "rank " in err) == (2, True, False), err
    (tmp_path / shard).rename(kept / shard)
    assert ptdp(*arguments, "--trainer.max_steps=3")[0] == 0
    assert only_run(tmp_path) == run, "the run was not continued"
    assert read_metadata(latest).run["global_step"] == 3
    code, _, err = ptdp("fit", "--config", config, "--resume=auto")
    assert (code, "Use --trainer.strategy ptdp" in err) == (2, True)
    assert ptdp(*arguments[:-1], "--init_from", str(latest), "--trainer.max_steps=1")[0] == 0
    code, _, err = ptdp(*arguments[:-1], "--init_from", str(tmp_path / "nothing"))
    assert (code, "does not exist" in err) == (2, True)
