"""``ptdp predict`` writes the same predictions in every layout."""

import json

import pytest
import torch

from lightning_ptdp.callbacks.written_outputs import _records
from tests.cli.commands import PTDP

pytestmark = pytest.mark.thorough


LAYOUTS = {
    "one": [],
    "t2p2": [*PTDP, "--trainer.strategy.virtual_pipeline_size=1"],
    "d2": [
        "--trainer.devices=2",
        "--trainer.strategy=lightning_ptdp.PTDPStrategy",
        "--trainer.strategy.start_method=fork",
    ],
    "c2": [
        "--trainer.devices=2",
        "--trainer.strategy=lightning_ptdp.PTDPStrategy",
        "--trainer.strategy.context_parallel_size=2",
        "--trainer.strategy.start_method=fork",
    ],
}


@pytest.fixture
def checkpoint(ptdp, config, tmp_path):
    assert ptdp("fit", "--config", config, "--trainer.max_steps=2", "--sample=null")[0] == 0
    (found,) = tmp_path.glob("runs/tiny/*/checkpoints/last.ckpt")
    return str(found)


def test_predictions_equal_single_process_in_every_layout(ptdp, config, tmp_path, checkpoint):
    # 9 samples in batches of 8: the last batch is mostly padding, at different positions in each
    # layout.
    common = [
        "predict",
        "--config",
        config,
        "--ckpt_path",
        checkpoint,
        "--data.validation_samples=9",
        "--trainer.logger=false",
    ]
    found = {}
    for name, layout in LAYOUTS.items():
        file = tmp_path / "new folder" / f"{name}.jsonl"
        code, out, err = ptdp(*common, *layout, "--output", str(file))
        assert code == 0, err
        assert "nll" not in out
        found[name] = [json.loads(line) for line in file.read_text().splitlines()]
    for lines in found.values():
        assert [line["sample"] for line in lines] == list(range(9))
        for line, expected in zip(lines, found["one"], strict=True):
            assert line == pytest.approx(expected, rel=1e-5)
    (first, *_) = found["one"]
    assert first["token_count"] == 16
    assert first["loss"] == pytest.approx(first["nll"] / 16)
    assert len({line["nll"] for line in found["one"]}) == 9

    code, out, _ = ptdp(*common)
    assert [json.loads(line) for line in out.splitlines()] == found["one"]


def test_unwritable_output_is_refused(ptdp, config, tmp_path):
    for output in (tmp_path, tmp_path / "tiny.yaml" / "x.jsonl"):
        code, _, err = ptdp("predict", "--config", config, "--output", str(output))
        assert (code, f"--output {output}" in err) == (2, True)


def test_batch_is_split_into_records():
    assert list(_records(torch.tensor([[1, 2], [3, 4]]), None)) == [
        {"prediction": [1, 2]},
        {"prediction": [3, 4]},
    ]
    assert list(_records({"a": torch.tensor([1.5, 2.5]), "b": torch.tensor([1, 2])}, [-1, 7])) == [
        {"sample": 7, "a": 2.5, "b": 2}
    ]
    for outputs, words in (
        (torch.tensor(1.0), "a Tensor"),
        ({"a": 1}, "a mapping of int"),
        (None, "a NoneType"),
    ):
        with pytest.raises(ValueError, match=f"predict_step returned {words}"):
            list(_records(outputs, None))
