"""Checkpoint choice of ``--resume auto``: only from the same experiment."""

import copy
from pathlib import Path

import fsspec
import lightning.pytorch as L
import pytest
import torch
import yaml

from lightning_ptdp.checkpoint import newest_checkpoint, read_metadata, save_checkpoint
from lightning_ptdp.checkpoint.memory_folders import MemoryFolder
from lightning_ptdp.cli.lightning_cli import parsed_values
from lightning_ptdp.cli.resume import (
    differences,
    experiment_of,
    find_newest,
    was_requeued,
)
from lightning_ptdp.data import TextDataModule
from lightning_ptdp.parameters.placement import Placement
from tests.cli.commands import SAVE_EACH_STEP
from tests.cli.conftest import tiny

PTDP = "--trainer.strategy=lightning_ptdp.PTDPStrategy"


@pytest.fixture(scope="module")
def values(corpus, prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiment")
    (folder / "tiny.yaml").write_text(tiny(corpus, prepared, folder))
    return parsed_values(["--config", str(folder / "tiny.yaml"), PTDP])


def experiment(values, num_replicas=1, **changed):
    """Return the experiment of the configuration with changes given as ``a__b=value``."""
    values = copy.deepcopy(values)
    for name, value in changed.items():
        *path, last = name.split("__")
        place = values
        for key in path:
            place = place[key]
            place = place.get("init_args", place)
        place[last] = value
    datamodule = TextDataModule(**values["data"]["init_args"])
    return experiment_of(values, datamodule, num_replicas=num_replicas)


@pytest.mark.parametrize(
    "changed",
    [
        {"trainer__max_steps": 100, "trainer__max_epochs": 7},
        {"trainer__devices": 2, "trainer__strategy__tensor_parallel_size": 2},
        {"trainer__devices": 2, "num_replicas": 2},
        {"num_replicas": 2, "data__num_microbatches": 2},
        {
            "data__micro_batch_size": 4,
            "data__num_microbatches": 2,
            "trainer__strategy__num_microbatches": 2,
        },
        {
            "data__num_workers": 1,
            "trainer__strategy__recompute": "full",
            "trainer__strategy__timeout_s": 60,
        },
        {"trainer__logger": False, "trainer__callbacks": None, "sample": None, "export": "folder"},
        {
            "trainer__val_check_interval": 2,
            "trainer__default_root_dir": "elsewhere",
            "data__validation_samples": 4,
        },
    ],
)
def test_layout_length_and_output_keep_same_experiment(values, changed):
    assert differences(experiment(values), experiment(values, **changed)) == []


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"seed_everything": 2}, "seed_everything"),
        ({"model__optimizer": {"learning_rate": 0.02}}, "model.optimizer.learning_rate"),
        ({"model__config": {"num_layers": 2}}, "model.config.num_layers"),
        ({"data__sequence_length": 8}, "data.sequence_length"),
        ({"data__data_dir": "another"}, "data.data_dir"),
        ({"trainer__gradient_clip_val": 2.0}, "trainer.gradient_clip_val"),
        ({"trainer__precision": "bf16-true"}, "trainer.precision"),
        ({"data__micro_batch_size": 4}, "samples per step"),
        ({"init_from": "weights.ckpt"}, "init_from"),
    ],
)
def test_training_option_changes_experiment(values, changed, name):
    assert name in differences(experiment(values), experiment(values, **changed))


def save(path, step, **run):
    value = (torch.zeros(2), Placement.replicated((2,)))
    save_checkpoint(
        path,
        tensors={"model/w": value, "optimizer/0/m/w": value},
        state={},
        metadata={"global_step": step, **run},
    )
    return path


@pytest.fixture
def trainer(tmp_path):
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )


def test_newest_checkpoint_of_own_experiment_is_found(trainer, tmp_path):
    save(tmp_path / "a" / "1.ckpt", 1, experiment={"seed": "1"})
    own = save(tmp_path / "a" / "2.ckpt", 2, experiment={"seed": "1"})
    other = save(tmp_path / "b" / "9.ckpt", 9, experiment={"seed": "2"})
    assert find_newest(trainer, {"seed": "1"}).own == own
    found = find_newest(trainer, {"seed": "3"})
    assert (found.own, found.other) == (None, other)
    assert found.why == "seed is 2 in the checkpoint, but 3 in this experiment"


def test_stale_snapshot_of_another_experiment_is_not_resumed(trainer, tmp_path):
    own = save(tmp_path / "1.ckpt", 1, experiment={"seed": "1"})
    memory = MemoryFolder.new(tmp_path)
    try:
        memory.create()
        stale = save(memory.path / "step-9", 9, experiment={"seed": "2"})
        memory.publish(stale, linked=True)
        assert newest_checkpoint(tmp_path) == stale
        assert find_newest(trainer, {"seed": "1"}).own == own
        found = find_newest(trainer, {"seed": "3"})
        assert (found.own, found.other) == (None, stale)
        assert found.why == "seed is 2 in the checkpoint, but 3 in this experiment"
    finally:
        memory.remove(linked=True)


@pytest.mark.parametrize("experiment_there", [None, "seed 1", ["seed"]])
def test_checkpoint_without_experiment_is_not_resumed(trainer, tmp_path, experiment_there):
    old = save(
        tmp_path / "old.ckpt",
        1,
        **({} if experiment_there is None else {"experiment": experiment_there}),
    )
    found = find_newest(trainer, {"seed": "1"})
    assert (found.own, found.other) == (None, old)
    assert "does not name its experiment" in found.why


def test_run_from_named_checkpoint_resumes_its_own_checkpoint(trainer, tmp_path):
    save(tmp_path / "a.ckpt", 5, experiment={"seed": "1"}, started_from=None)
    assert find_newest(trainer, {"seed": "1"}, started_from="old.ckpt").own is None
    own = save(tmp_path / "b.ckpt", 3, experiment={"seed": "1"}, started_from="old.ckpt")
    assert find_newest(trainer, {"seed": "1"}, started_from="old.ckpt").own == own
    assert find_newest(trainer, {"seed": "1"}).own == own


def test_requeued_job_is_detected_by_restart_count(monkeypatch):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert not was_requeued()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert not was_requeued()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert was_requeued()


def save_each_step(config, **options):
    """Change the recipe: it saves a checkpoint at each step, and neither logs nor validates."""
    settings = yaml.safe_load(Path(config).read_text())
    settings["trainer"] |= {
        "logger": False,
        "limit_val_batches": 0,
        "val_check_interval": None,
        "callbacks": [SAVE_EACH_STEP],
        **options,
    }
    Path(config).write_text(yaml.safe_dump(settings))


@pytest.mark.thorough
def test_second_experiment_in_folder_starts_afresh_and_reports(ptdp, config, tmp_path, monkeypatch):
    """Under SLURM, Lightning alone would load ``hpc_ckpt_1.ckpt`` of the first experiment."""
    save_each_step(config)
    said = []
    monkeypatch.setattr("lightning_ptdp.cli.run.rank_zero_info", said.append)
    for name in ("SLURM_NTASKS", "SLURM_NNODES"):
        monkeypatch.setenv(name, "1")
    arguments = ["fit", "--config", config, PTDP, "--sample=null", "--resume=auto"]

    assert ptdp(*arguments, "--trainer.max_steps=2")[0] == 0
    first = newest_checkpoint(tmp_path)
    left = tmp_path / "hpc_ckpt_1.ckpt"
    first.rename(left)
    code, _, err = ptdp(*arguments, "--trainer.max_steps=1", "--model.optimizer.learning_rate=0.02")
    assert code == 0, err
    second = newest_checkpoint(tmp_path)
    assert second is not None
    assert read_metadata(second).run["global_step"] == 1
    assert (
        f"{left} is not used: model.optimizer.learning_rate is 0.01 in the checkpoint, but 0.02 in this"
        in "\n".join(said)
    )
    assert f"--ckpt_path {left}" in "\n".join(said)

    code, _, err = ptdp(*arguments, "--trainer.max_steps=3", "--ckpt_path", str(left))
    assert code == 0, err
    assert f"starting from {left}" in "\n".join(said)
    third = newest_checkpoint(tmp_path)
    assert third is not None
    assert read_metadata(third).run["global_step"] == 3
    assert read_metadata(third).run["started_from"] == str(left)


@pytest.mark.thorough
def test_auto_resume_and_ckpt_path_accept_addresses(config, ptdp, tmp_path, monkeypatch):
    root = "memory://auto/runs"
    store = fsspec.filesystem("memory")
    store.store.clear()
    save_each_step(config, default_root_dir=root)
    said = []
    monkeypatch.setattr("lightning_ptdp.cli.run.rank_zero_info", said.append)
    monkeypatch.chdir(tmp_path)
    arguments = ["fit", "--config", config, PTDP]

    code, _, err = ptdp(*arguments, "--resume=auto", "--trainer.max_steps=2")
    assert code == 0, err
    store.pipe_file("/auto/runs/checkpoints/newer.ckpt/save-00000000-0/index.json", b"{}")
    assert ptdp(*arguments, "--resume=auto", "--trainer.max_steps=3")[0] == 0
    assert said[-1].startswith(f"--resume auto: resuming from {root}/checkpoints/")
    last = f"{root}/checkpoints/last.ckpt"
    assert read_metadata(last).run["global_step"] == 3
    code, _, err = ptdp(*arguments, f"--ckpt_path={last}", "--trainer.max_steps=4")
    assert code == 0, err
    assert read_metadata(last).run["global_step"] == 4
    code, _, err = ptdp(*arguments, f"--init_from={last}", "--trainer.max_steps=1")
    assert code == 0, err
    assert read_metadata(newest_checkpoint(root)).run["global_step"] == 1
    code, out, err = ptdp(*arguments, "--resume=auto", "--ckpt_path=s3://key:hidden@bucket/x")
    assert code == 2
    assert "contains credentials" in err
    assert "hidden" not in f"{out}{err}{said}"
    code, _, err = ptdp(*arguments, f"--ckpt_path={root}/checkpoints/newer.ckpt")
    assert code == 2
    assert "newer.ckpt is a folder, but not a checkpoint: it has no metadata.json" in err
    code, _, err = ptdp(*arguments, f"--ckpt_path={root}/absent.ckpt")
    assert code == 2
    assert f"{root}/absent.ckpt does not exist; {root} contains checkpoints" in err
    code, out, err = ptdp("generate", f"--checkpoint={last}", "--max_new_tokens=4")
    assert code == 0, err
    assert out.startswith("def ")
    # What the callbacks of this package write stays on this machine.
    assert {path.name for path in tmp_path.iterdir()} >= {"lightning_logs", "tiny.yaml"}
    assert not (tmp_path / "memory:").exists()
