"""Jobs on the SLURM cluster that ci/slurm.sh starts.

The jobs use generated and documented scripts, are requeued, lose a node, or belong to two
experiments.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import launchers
import torch

from lightning_ptdp.checkpoint import newest_checkpoint, read_full, read_metadata

LIMIT_S = 900.0
STEPS = 30
PTDP = [sys.executable, "-m", "lightning_ptdp"]
DOCUMENTED = Path(__file__).parents[1] / "docs" / "machines.md"

CONFIG = """\
base: gpt/nano
trainer:
  devices: 2
  num_nodes: 2
  max_steps: {steps}
  val_check_interval: null
  limit_val_batches: 0
  default_root_dir: {root}
  logger: false
  strategy: {{init_args: {{virtual_pipeline_size: 1, timeout_s: 120}}}}
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{every_n_train_steps: 5, save_top_k: 1, monitor: step, mode: max, save_last: true}}
    - class_path: paced.Paced
      init_args: {{seconds: {seconds}}}
model: {{init_args: {{config: {{vocabulary_size: 320, sequence_length: 16, hidden_size: 32, num_heads: 2}}}}}}
data: {{init_args: {{data_dir: {data}, source: {source}, vocabulary_size: 320, sequence_length: 16, micro_batch_size: 2}}}}
sample: null
"""
PACED = '''\
"""Slows the first start of a job down, so that something can happen to it."""

import os
import time

import lightning.pytorch as L


class Paced(L.Callback):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" else 0.0

    def on_train_batch_start(self, *_) -> None:
        time.sleep(self.seconds)
'''


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "paced.py").write_text(PACED)
    draw = random.Random(0)
    words = ["the", "a", "stage", "rank", "layer", "sends", "waits", "holds"]
    (folder / "corpus.txt").write_text(
        "\n".join(" ".join(draw.choices(words, k=12)) + "." for _ in range(2000))
    )
    run("scontrol", "show", "nodes")
    wait(lambda: run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", "two idle nodes")
    whole = config(folder, "whole")
    run(*PTDP, "prepare", "--config", str(whole), cwd=folder)

    same_script(folder)
    print("a script has bitwise equal weights with srun on two nodes and without SLURM")
    expected = weights(folder, "whole", generated(folder, whole))
    print("the generated script trains on two nodes")
    same(expected, weights(folder, "documented", documented(folder, config(folder, "documented"))))
    print("the documented script does the same")
    two_experiments(folder, whole)
    print("a second experiment in the folder starts afresh")
    requeued(folder, expected)
    print("a job that is requeued at its time limit ends like one that is not")
    lost_node(folder, expected)
    print("a job that loses a node continues when the node is back")


def same_script(folder: Path) -> None:
    """Check that a script has the same weights, bit for bit, as without SLURM."""
    (folder / "python").mkdir()
    launchers.by_python(folder / "python")
    (folder / "srun").mkdir()
    command = f"srun {sys.executable} {launchers.SCRIPT} {folder / 'srun'} 2 2"
    options = ["--nodes=2", "--ntasks-per-node=2", f"--output={folder}/srun-%j.log"]
    said = run("sbatch", *options, f"--wrap={command}", cwd=folder)
    job = submitted(said, True)
    assert field(job, "JobState") == "COMPLETED", output(folder, job)
    assert launchers.trained(folder, "srun") == launchers.trained(folder, "python"), "other weights"


def requeued(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Check a job that is requeued at its time limit.

    The signal arrives within a minute. The job then has five more minutes to start and save. Both
    times depend on the load of the machine."""
    job = generated(
        folder,
        config(folder, "requeued", seconds=4.0),
        "--time=0:06:00",
        "--sbatch=--signal=SIGUSR1@300",
        finish=False,
    )
    wait(lambda: restarts(job) == 1, "a requeue")
    # otherwise a start that takes a minute is signalled again at its end
    run("scontrol", "update", f"JobId={job}", "TimeLimit=0:30:00")
    finish(job)
    log = output(folder, job)
    assert "resuming from" in log, log
    assert not list((folder / "requeued").glob("hpc_ckpt_*")), "a checkpoint is left"
    same(expected, weights(folder, "requeued", job))


def lost_node(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    job = generated(folder, config(folder, "lost", seconds=1.0), finish=False)
    wait(lambda: newest_checkpoint(folder / "lost") is not None, "a checkpoint")
    for pid in run("ip", "netns", "pids", "n1").split():
        subprocess.run(["kill", "-KILL", pid], check=False)
    wait(lambda: restarts(job) == 1, "a requeue after the loss of a node")
    run(str(folder / "start_node"), "n1")
    finish(job)
    same(expected, weights(folder, "lost", job))


def two_experiments(folder: Path, first: Path) -> None:
    job = generated(folder, first, "--model.optimizer.learning_rate=0.001", "--trainer.max_steps=5")
    log = output(folder, job)
    assert (
        "is not used: model.optimizer.learning_rate is 0.003 in the checkpoint, but 0.001 in this experiment"
        in log
    ), log
    newest = newest_checkpoint(folder / "whole")
    assert newest is not None and read_metadata(newest).run["global_step"] == 5, log


def config(folder: Path, name: str, *, seconds: float = 0.0) -> Path:
    path = folder / f"{name}.yaml"
    values = {
        "steps": STEPS,
        "root": folder / name,
        "seconds": seconds,
        "data": folder / "data",
        "source": folder / "corpus.txt",
    }
    path.write_text(CONFIG.format(**values))
    return path


def generated(folder: Path, path: Path, *options: str, finish: bool = True) -> str:
    """Submit a job with ``ptdp fit --launcher slurm`` and return its number."""
    said = run(*PTDP, "fit", "--config", str(path), "--launcher=slurm", *options, cwd=folder)
    return submitted(said, finish)


def documented(folder: Path, path: Path) -> str:
    """Submit the script from the documentation page on this cluster."""
    text = DOCUMENTED.read_text().partition('title="train.sbatch"\n')[2].partition("```")[0]
    text = text.replace("/shared/project", str(folder)).replace(
        "/shared/venv/bin/python", sys.executable
    )
    text = re.sub(r"#SBATCH --gpus-per-node.*\n", "", text).replace("gpt/124m", str(path))
    for name, value in {
        "nodes": 2,
        "ntasks-per-node": 2,
        "cpus-per-task": 1,
        "trainer.num_nodes": 2,
        "trainer.devices": 2,
    }.items():
        text, count = re.subn(rf"--{name}=\d+", f"--{name}={value}", text)
        assert count == 1, f"the page's script has no --{name}"
    done = subprocess.run(
        ["sbatch"], input=text, cwd=folder, capture_output=True, text=True, check=True
    )
    return submitted(done.stdout, True)


def submitted(said: str, wait_for_end: bool) -> str:
    found = re.search(r"Submitted batch job (\d+)", said)
    assert found is not None, said
    if wait_for_end:
        finish(found[1])
    return found[1]


def finish(job: str) -> None:
    wait(
        lambda: (
            field(job, "JobState")
            not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
        ),
        f"the end of job {job}",
    )


def restarts(job: str) -> int:
    return int(field(job, "Restarts"))


def field(job: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\S+)", run("scontrol", "show", "job", job))
    assert found is not None
    return found[1]


def output(folder: Path, job: str) -> str:
    return "".join(path.read_text() for path in folder.glob(f"*-{job}.log"))


def weights(folder: Path, name: str, job: str) -> dict[str, torch.Tensor]:
    """Return the final weights of a job that has completed training."""
    assert field(job, "JobState") == "COMPLETED", output(folder, job)
    newest = newest_checkpoint(folder / name)
    assert newest is not None and read_metadata(newest).run["global_step"] == STEPS, output(
        folder, job
    )
    return read_full(newest)


def same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    differing = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    assert not differing, f"other weights: {differing}"


def wait(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not reached():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {LIMIT_S:.0f} s: {what}\n{run('squeue')}{run('sinfo')}")
        time.sleep(0.5)


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
