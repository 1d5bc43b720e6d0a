"""Elastic training under torchrun: restart after a lost rank, also with another world size."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_ptdp.checkpoint import newest_checkpoint, read_full, read_metadata
from lightning_ptdp.cli import main
from tests.cli.commands import SAVE_EACH_STEP
from tests.pool import Pool

pytestmark = pytest.mark.thorough

Run = Callable[..., tuple[int, str, str]]

STEPS = 6


def configure(config, path, *, devices, steps, callbacks=()):
    """Write the tiny configuration with a global batch independent of the number of replicas."""
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
    settings["model"]["init_args"]["optimizer"]["decay_steps"] = (
        100  # otherwise derived from max_steps
    )
    settings["data"]["init_args"] |= {
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "num_microbatches": None,
    }
    path.write_text(yaml.safe_dump({**settings, "sample": None}))
    return str(path)


def _fit(config):
    """Run ``ptdp fit`` in a process of torchrun and return the number of restarts so far."""
    if main(["fit", "--config", config, "--resume", "auto"]):
        raise RuntimeError("ptdp fit failed")
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def _torchrun(rank, config, folder):
    """Run like ``torchrun --standalone --nproc-per-node 2 --max-restarts 2``, but fork processes,
    which have torch loaded."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="elastic",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"is_host": True},
        local_addr="127.0.0.1",
        max_restarts=2,
        monitor_interval=0.1,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )
    return elastic_launch(launch, _fit)(config)


def test_run_resumes_on_fewer_replicas_and_after_lost_rank(ptdp, config, tmp_path):
    """Train 2 steps on 4 replicas, then on 2 replicas, of which one is killed at step 4."""
    code, _, err = ptdp(
        "fit", "--config", configure(config, tmp_path / "whole.yaml", devices=1, steps=STEPS)
    )
    assert code == 0, err
    code, _, err = ptdp(
        "fit",
        "--config",
        configure(config, tmp_path / "four.yaml", devices=4, steps=2),
        "--resume=auto",
    )
    assert code == 0, err
    dies = {
        "class_path": "tests.cli.killing_callback.DiesOnce",
        "init_args": {"step": 4, "notes": str(tmp_path)},
    }
    # two processes join, whatever the file says
    two = configure(config, tmp_path / "two.yaml", devices=4, steps=STEPS, callbacks=[dies])
    # a worker that has trained has threads, which do not survive a fork
    with contextlib.closing(Pool()) as fresh:
        (restarts,) = fresh.run(_torchrun, world_size=1, args=(two, str(tmp_path)))
    assert restarts == {0: "1", 1: "1"}
    starts = {path.name: int(path.read_text()) for path in tmp_path.glob("start-*")}
    assert starts == {
        "start-0-rank-0": 2,
        "start-0-rank-1": 2,
        "start-1-rank-0": 4,
        "start-1-rank-1": 4,
    }

    newest, whole = newest_checkpoint(tmp_path / "run"), newest_checkpoint(tmp_path / "whole")
    assert newest is not None and whole is not None
    assert (
        read_metadata(newest).run["global_step"] == read_metadata(whole).run["global_step"] == STEPS
    )
    assert read_metadata(newest).run["layout"] == "t1 p1 d2"
    expected = read_full(whole)
    for name, value in read_full(newest).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
