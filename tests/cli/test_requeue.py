"""Requeued SLURM jobs and their continuation."""

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from lightning_ptdp.callbacks.save_on_signal import superseded
from lightning_ptdp.checkpoint import newest_checkpoint, read_full, read_metadata, save_checkpoint
from lightning_ptdp.cli import entry, main
from lightning_ptdp.parameters.placement import Placement
from tests.cli.commands import SAVE_EACH_STEP

# SLURM ends the processes of a requeued job.
SCONTROL = """#!/bin/bash
echo "$@" >> {notes}
kill -TERM $PPID
"""
STEPS = 5


def configure(config, folder):
    settings = yaml.safe_load(Path(config).read_text())
    settings["trainer"] |= {
        "max_steps": STEPS,
        "strategy": {
            "class_path": "lightning_ptdp.PTDPStrategy",
            "init_args": {"async_save": True},
        },
        "logger": False,
        "limit_val_batches": 0,
        "val_check_interval": None,
        "default_root_dir": str(folder),
        "callbacks": [SAVE_EACH_STEP],
    }
    folder.mkdir()
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**settings, "sample": None}))
    return str(path)


def _job(rank, config, folder, restarts, signalled):
    """Run a job of one task; SLURM's signal arrives while the verb is being imported."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name)
    tasks = {
        "NTASKS": 1,
        "NNODES": 1,
        "PROCID": 0,
        "LOCALID": 0,
        "NODEID": 0,
        "JOB_ID": 77,
        "RESTART_COUNT": restarts,
    }
    os.environ.update({f"SLURM_{name}": str(value) for name, value in tasks.items()})
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"

    def arriving(name):
        if signalled:
            os.kill(os.getpid(), signal.SIGUSR1)
        return importlib.import_module(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "importlib", SimpleNamespace(import_module=arriving))
        try:
            return main(["fit", "--config", config])
        finally:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.thorough
def test_early_signal_requeues_job_that_resumes_bitwise_equal(pool, config, tmp_path):
    (tmp_path / "scontrol").write_text(SCONTROL.format(notes=tmp_path / "requeued"))
    (tmp_path / "scontrol").chmod(0o755)
    job, whole = tmp_path / "job", tmp_path / "whole"
    arguments = (configure(config, job), str(tmp_path))
    assert pool.run(_job, world_size=1, args=(*arguments, 0, True)) == [143]
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"
    assert (job / "hpc_ckpt_1.ckpt").is_dir()
    stopped = newest_checkpoint(job)
    assert stopped is not None
    assert 0 < read_metadata(stopped).run["global_step"] < STEPS

    assert pool.run(_job, world_size=1, args=(*arguments, 1, False)) == [0]
    assert not [path.name for path in job.iterdir() if "hpc" in path.name or path.is_symlink()]
    assert pool.run(
        _job, world_size=1, args=(configure(config, whole), str(tmp_path), 0, False)
    ) == [0]
    ends = [newest_checkpoint(job), newest_checkpoint(whole)]
    assert [read_metadata(end).run["global_step"] for end in ends if end] == [STEPS, STEPS]
    requeued, undisturbed = (read_full(end) for end in ends if end)
    assert requeued.keys() == undisturbed.keys()
    assert all(torch.equal(value, undisturbed[name]) for name, value in requeued.items())


def save(path, **run):
    save_checkpoint(
        path,
        tensors={"model/w": (torch.zeros(2), Placement.replicated((2,)))},
        state={},
        metadata=run,
    )
    return path


def test_only_older_checkpoints_of_the_same_run_are_superseded(tmp_path):
    own = save(tmp_path / "hpc_ckpt_1.ckpt", experiment={"seed": "1"})
    other = save(tmp_path / "hpc_ckpt_2.ckpt", experiment={"seed": "2"})
    unknown = save(tmp_path / "hpc_ckpt_3.ckpt")
    found = [own, other, unknown, tmp_path / "hpc_ckpt_4.ckpt"]
    assert superseded(found, saved=[], own=[], experiment={"seed": "1"}) == []
    last = save(tmp_path / "last.ckpt", experiment={"seed": "1"})
    assert superseded(found, saved=[last], own=[], experiment={"seed": "1"}) == [own]
    assert superseded(found, saved=[last], own=[unknown], experiment=None) == [unknown]
    newer = save(tmp_path / "hpc_ckpt_5.ckpt", experiment={"seed": "1"})
    assert superseded([own, newer], saved=[], own=[own, newer], experiment=None) == [own]


@pytest.mark.parametrize(("job", "held"), [("77", True), (None, False)])
def test_signal_is_held_before_imports_in_slurm_jobs_only(job, held):
    code = """
import signal, sys
from lightning_ptdp.cli import main
assert "lightning_ptdp.cli.entry" not in sys.modules
class Finder:
    def find_spec(self, name, *_):
        if name == "lightning_ptdp.cli.entry":
            print(type(signal.getsignal(signal.SIGUSR1)).__name__)
sys.meta_path.insert(0, Finder())
main(["--version"])
"""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM")
    }
    environment |= {} if job is None else {"SLURM_JOB_ID": job}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[0] == ("HeldSignal" if held else "Handlers")
