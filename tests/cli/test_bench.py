"""``ptdp bench``: training steps without data."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_ptdp.cli.bench import layout_options
from lightning_ptdp.cli.failures import UserError
from tests.cli.commands import PTDP
from tests.scripts import run_script

pytestmark = pytest.mark.thorough


@pytest.fixture
def no_data(config, tmp_path):
    """Return the configuration with a missing data folder."""
    values = yaml.safe_load(Path(config).read_text())
    values["data"]["init_args"] |= {
        "data_dir": str(tmp_path / "nothing"),
        "source": str(tmp_path / "no text"),
    }
    Path(config).write_text(yaml.safe_dump(values))
    return config


def test_bench_needs_no_data_and_leaves_no_files(ptdp, no_data, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    code, out, err = ptdp(
        "bench",
        "--config",
        no_data,
        *PTDP,
        "--trainer.devices=2",
        "--trainer.strategy.tensor_parallel_size=1",
        "--steps",
        "2",
        "--warmup",
        "1",
        "--json",
        "--peak_tflops",
        "1",
    )
    assert code == 0, err
    (found,) = json.loads(out.splitlines()[-1])
    assert (found["layout"], found["world_size"]) == ("t1 p2 v2 d1", 2)
    assert (
        found["samples"],
        found["tokens"],
        len(found["seconds"]),
        len(found["peak_memory_bytes"]),
    ) == (8, 128, 2, 2)
    assert found["bubble"] > 0
    # On a CPU only tensors are counted, not the other memory of the process.
    assert max(found["peak_memory_bytes"]) < 20 * 2**20
    assert "ptdp doctor --calibrate --devices 2" in found["predicted_by"]
    assert found["mfu"] == pytest.approx(found["flops"] / found["median_s"] / 2 / 1e12)
    assert sorted(tmp_path.rglob("*")) == before


def test_data_take_tokenizer_of_model(ptdp, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = ["--trainer.devices", "1", "--trainer.strategy.tensor_parallel_size", "1"]
    arguments = ["--config", "hf/nano", *one, "--steps", "1", "--warmup", "1", "--json"]
    code, out, err = ptdp("bench", *arguments)
    assert code == 0, err
    (found,) = json.loads(out.splitlines()[-1])
    assert found["world_size"] == 1


def forked(command, **_):
    assert command[:2] == [sys.executable, "-m"]
    return run_script(Path(command[2]), command[3:])


def test_layouts_are_compared_at_equal_batch_size(ptdp, no_data, tmp_path, monkeypatch):
    """The recipe has a base. The model supports the first layout, but not the second."""
    monkeypatch.setattr(subprocess, "run", forked)
    (tmp_path / "based.yaml").write_text(f"base: {Path(no_data).name}")
    strategy = [
        "--trainer.strategy=lightning_ptdp.PTDPStrategy",
        "--trainer.strategy.start_method=fork",
    ]
    steps = [
        "--steps=2",
        "--warmup=1",
        "--trainer.accumulate_grad_batches=2",
        "--trainer.devices=2",
        "--model.config.num_layers=1",
    ]
    code, out, err = ptdp(
        "bench",
        "--config",
        str(tmp_path / "based.yaml"),
        *strategy,
        *steps,
        "--compare",
        "t2 d1, p2",
    )
    assert code == 2, err
    assert "p2" in err.splitlines()[-1] or "pipeline_parallel_size=2" in err.splitlines()[-1]
    devices, _, _, *lines = out.splitlines()[-8:]
    # two replicas, accumulated twice
    assert "2 x cpu" in devices and "a step: 32 samples" in devices, out
    # 32 samples in microbatches of 2, accumulated twice
    assert [line for line in lines if re.search(r"t2 p1 d1 +8 ", line)], out
    assert "to use 1, add:" in out


def test_layout_text_is_parsed_to_options():
    found = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 4,
        "virtual_pipeline_size": 2,
        "context_parallel_size": 1,
        "expert_parallel_size": 1,
        "sequence_parallel": False,
    }
    assert layout_options(" p4 v2 ", 8) == layout_options("t1 p4 v2 d2", 8) == found
    assert layout_options("t2 sp", 2)["sequence_parallel"] is True
    assert "sequence_parallel" not in layout_options("t2", 2), (
        "the value of the configuration is overridden"
    )
    for text, words in {
        "t2 d4": "Use d2",
        "t3": "tensor_parallel_size",
        "t2 x4": "'x4' is not a degree",
        "t0": "'t0'",
    }.items():
        with pytest.raises(UserError, match=words):
            layout_options(text, 4)


@pytest.mark.parametrize("option", ["warmup", "peak_tflops"])
def test_zero_is_refused(ptdp, no_data, option):
    code, _, err = ptdp("bench", "--config", no_data, f"--{option}=0")
    assert (code, f"--{option} 0 must be" in err) == (2, True)


def test_comparison_under_launcher_is_refused(ptdp, no_data, monkeypatch):
    """The processes of the next layout would wait for the launcher's other ranks."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    code, _, err = ptdp("bench", "--config", no_data, "--trainer.devices=2", "--compare=p2")
    assert (code, "a launcher such as torchrun has started" in err) == (2, True)
