"""Checkpoints and folders of Hugging Face mixtures with distributed experts."""

import pytest
import torch

from lightning_ptdp.checkpoint import TensorReader
from lightning_ptdp.exchange import to_huggingface
from tests.expert_parallel.folders import Run, fit_counted
from tests.folders import read_huggingface
from tests.huggingface.architectures import build
from tests.letters import E, M, P, T

pytestmark = pytest.mark.thorough

pytest.importorskip("transformers")

FOLDER = {"checkpoint_format": "folder"}


def test_checkpoint_is_bitwise_equal_across_layouts(parity, tmp_path):
    """Weights and optimizer go from e4 to one process to t2 p2 e2, and weights to a folder."""
    layouts = [
        (4, {E: 4}),
        (1, FOLDER),
        (8, {T: 2, P: 2, M: 2, E: 2}),
    ]
    places = [str(tmp_path / f"{number}.ckpt") for number in range(len(layouts))]
    for (world_size, layout), resume, save in zip(layouts, [None, *places], places, strict=False):
        parity.ranks(Run(resume=resume, save=save).on((world_size, layout)))
    first, *others = [TensorReader(place) for place in places]
    names = set(first.tensors)
    assert any(name.startswith("optimizer") and "experts" in name for name in names), sorted(names)[
        :5
    ]
    for other in others:
        assert set(other.tensors) == names
        for name in names:
            assert torch.equal(first.read(name), other.read(name)), name
    to_huggingface(places[0], tmp_path / "folder")
    written = read_huggingface(tmp_path / "folder")
    gate = first.read("model/model.model.layers.1.mlp.experts.gate_up_proj")
    experts = [
        written[f"model.layers.1.block_sparse_moe.experts.{index}.w1.weight"] for index in range(4)
    ]
    assert torch.equal(torch.stack(experts), gate[:, : gate.size(1) // 2])


def test_sharded_export_equals_single_process_export(parity, tmp_path):
    for name, world_size, layout in (("one", 1, {}), ("two", 2, {E: 2})):
        parity.ranks(Run(export=str(tmp_path / name)).on((world_size, layout)))
    one, two = read_huggingface(tmp_path / "one"), read_huggingface(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert float((two[name] - value).norm() / value.norm()) < 1e-5, name
    assert (tmp_path / "one/config.json").read_text() == (tmp_path / "two/config.json").read_text()


@pytest.mark.parametrize(
    "name", ["mixtral", "gpt_oss"], ids=["a file's tensor an expert", "all experts in one"]
)
def test_rank_reads_only_its_own_experts(name, parity, tmp_path):
    torch.manual_seed(11)
    model = build(name)
    model.save_pretrained(tmp_path)
    expected = model.state_dict()
    run = Run(steps=1, folder=str(tmp_path)).on((2, {E: 2}))
    found = parity.ranks(run, fit_counted)
    bytes_of = {
        key: sum(
            value.nbytes
            for n, value in expected.items()
            if (".experts." in n) == (key == "experts")
        )
        for key in ("experts", "others")
    }
    for rank in found:
        assert rank["read"] == {"experts": bytes_of["experts"] // 2, "others": bytes_of["others"]}
        for key, value in expected.items():
            assert torch.equal(rank["initial"][f"model.{key}"], value.float()), key
