"""Under torchrun a lost rank starts all of them again, and the world may be another one by then."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_ptdp.checkpoint import newest_checkpoint, read_full, read_metadata

Run = Callable[..., tuple[int, str, str]]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 150.0
SAVE_EACH_STEP = {
    "class_path": "ModelCheckpoint",
    "init_args": {"every_n_train_steps": 1, "save_top_k": 2, "monitor": "step", "mode": "max", "save_last": True},
}
DIES = {"class_path": "tests.cli.dying.DiesOnce", "init_args": {"step": 4}}
STEPS = 6


def configure(config: str, path: Path, *, devices: int, steps: int, callbacks: Sequence[Any] = ()) -> str:
    """The tiny configuration with a global batch that is the same for any number of replicas."""
    settings = yaml.safe_load(Path(config).read_text())
    settings["trainer"] |= {
        "devices": devices,
        "max_steps": steps,
        "strategy": {
            "class_path": "lightning_ptdp.PTDPStrategy",
            "init_args": {"start_method": "fork" if devices == 4 else "popen", "timeout_s": 60.0},
        },
        "logger": False,
        "limit_val_batches": 0,
        "val_check_interval": None,
        "default_root_dir": str(path.parent / ("whole" if devices == 1 else "run")),
        "callbacks": [SAVE_EACH_STEP, *callbacks],
    }
    settings["data"]["init_args"] |= {"global_batch_size": 16, "micro_batch_size": 2, "num_microbatches": None}
    path.write_text(yaml.safe_dump({**settings, "sample": None}))
    return str(path)


def torchrun(arguments: Sequence[str], folder: Path) -> str:
    """What ``torchrun`` and its two processes print."""
    script = folder / "train.py"
    script.write_text("import sys\nfrom lightning_ptdp.cli import main\n\nsys.exit(main())\n")
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "--monitor-interval", "0.1"]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_PORT", "MASTER_ADDR")
    clean = {key: value for key, value in os.environ.items() if key not in names and not key.startswith("SLURM")}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(script), *arguments],
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_four_replicas_then_two_of_which_one_dies(ptdp: Run, config: str, tmp_path: Path) -> None:
    """2 steps on 4 replicas; on 2 replicas to step 4, where one dies; started again to the end."""
    code, _, err = ptdp("fit", "--config", configure(config, tmp_path / "whole.yaml", devices=1, steps=STEPS))
    assert code == 0, err
    code, _, err = ptdp("fit", "--config", configure(config, tmp_path / "four.yaml", devices=4, steps=2), "--resume=auto")
    assert code == 0, err
    two = configure(config, tmp_path / "two.yaml", devices=2, steps=STEPS, callbacks=[DIES])
    printed = torchrun(["fit", "--config", two, "--resume", "auto"], tmp_path)

    continued = re.findall(r"--resume auto: continuing from (\S+)", printed)
    assert len(continued) >= 2, printed
    newest, whole = newest_checkpoint(tmp_path / "run"), newest_checkpoint(tmp_path / "whole")
    assert newest is not None and whole is not None
    assert read_metadata(newest).run["global_step"] == read_metadata(whole).run["global_step"] == STEPS
    assert read_metadata(newest).run["layout"] == "t1 p1 v1 d2"
    expected = read_full(whole)
    for name, value in read_full(newest).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
