"""``ptdp bench``: real steps, no data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lightning_ptdp.cli.bench import layout_options
from lightning_ptdp.cli.errors import UserError
from tests.cli.commands import PTDP

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def no_data(config: str, tmp_path: Path) -> str:
    """The configuration with a data folder that is not there."""
    values = yaml.safe_load(Path(config).read_text())
    values["data"]["init_args"] |= {"data_dir": str(tmp_path / "nothing"), "source": str(tmp_path / "no text")}
    Path(config).write_text(yaml.safe_dump(values))
    return config


def test_a_pipeline_is_measured_without_data_and_leaves_nothing(ptdp: Run, no_data: str, tmp_path: Path) -> None:
    code, out, err = ptdp("bench", "--config", no_data, *PTDP, "--steps", "2", "--warmup", "1", "--json", "--peak_tflops", "1")
    assert code == 0, err
    (found,) = json.loads(out.splitlines()[-1])
    assert (found["layout"], found["world_size"]) == ("t2 p2 v2 d1", 4)
    assert (found["samples"], found["tokens"], len(found["seconds"]), len(found["peak_memory_bytes"])) == (8, 128, 2, 4)
    assert found["bubble"] > 0
    assert found["mfu"] == pytest.approx(found["flops"] / found["median_s"] / 4 / 1e12)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_another_layout_is_compared_in_processes_of_its_own(ptdp: Run, no_data: str, tmp_path: Path) -> None:
    shutil.copy(no_data, tmp_path / "again.yaml")
    strategy = ["--trainer.strategy=lightning_ptdp.PTDPStrategy", "--trainer.strategy.start_method=fork"]
    steps = ["--steps=2", "--warmup=1", "--trainer.accumulate_grad_batches=2"]
    code, out, err = ptdp("bench", "--config", no_data, *strategy, *steps, "--trainer.devices=2", "--compare", "t2")
    assert code == 0, err
    layouts, *others = out.splitlines()[-11:]
    assert layouts.split("  ")[-1].strip() == "t2 p1 d1", out
    (steps_line,) = [line for line in others if line.startswith("step  ")]
    assert "32 samples" in steps_line  # two replicas, accumulated twice
    assert "16 samples" in steps_line
    assert others[-1].startswith("speed, of the first")


def test_layouts_as_options() -> None:
    assert {*layout_options(" p4 v2 ")} == {
        "--trainer.strategy.tensor_parallel_size=1",
        "--trainer.strategy.pipeline_parallel_size=4",
        "--trainer.strategy.virtual_pipeline_size=2",
        "--trainer.strategy.context_parallel_size=1",
        "--trainer.strategy.sequence_parallel=false",
    }
    with pytest.raises(UserError, match="'d2' is not a degree"):
        layout_options("t2 d2")


@pytest.mark.parametrize(("option", "words"), [("--steps=0", "--steps 0"), ("--warmup=0", "--warmup 0"), ("--compare=x", "'x'")])
def test_mistakes(ptdp: Run, no_data: str, option: str, words: str) -> None:
    code, _, err = ptdp("bench", "--config", no_data, option)
    assert (code, words in err) == (2, True)
