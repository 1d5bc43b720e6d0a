"""Checkpoints saved in one layout and loaded in another, compared in every element."""

from pathlib import Path

import pytest
import torch

from lightning_ptdp.checkpoint import (
    CheckpointError,
    load_tensors,
    read_full,
    read_metadata,
    read_state,
    save_checkpoint,
)
from tests.checkpoint.layouts import LAYOUTS, Layout, blank, full_model, held, replicated, save

pytestmark = pytest.mark.thorough

STATE = {"epoch": 3, "loops": {"fit_loop": {"batches": [1, 2]}}, "best": torch.tensor(0.25)}


def _save(rank, layouts, folder):
    for layout in layouts:
        save_checkpoint(
            f"{folder}/{layout}",
            tensors=held(layout, rank),
            state=STATE,
            metadata={"layout": str(layout)},
        )


def _load(rank, layout, folder):
    expected = held(layout, rank)
    for source in LAYOUTS:
        found = blank(expected)
        assert load_tensors(f"{folder}/{source}", found, prefix="model/") == []
        for name, (tensor, _) in found.items():
            assert tensor.dtype == expected[name][0].dtype
            assert torch.equal(tensor, expected[name][0]), f"{name} from {source} to {layout}"


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for world in (1, 2, 4):
        pool.run(
            _save,
            world_size=world,
            args=([layout for layout in LAYOUTS if layout.world == world], str(folder)),
        )
    return folder


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_loads_from_every_layout(pool, saved, layout):
    pool.run(_load, world_size=layout.world, args=(layout, str(saved)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_single_process_without_group_reads_every_layout(saved, layout):
    full = read_full(saved / str(layout))
    assert full.keys() == {name.removeprefix("model/") for name in full_model()}
    for name, (tensor, _) in full_model().items():
        assert torch.equal(full[name.removeprefix("model/")], tensor)
    assert read_state(saved / str(layout)) == STATE
    metadata = read_metadata(saved / str(layout))
    assert metadata.run == {"layout": str(layout)}
    assert {name: (entry.shape, entry.dtype) for name, entry in metadata.tensors.items()} == {
        "state/0": ((), torch.float32),
        **{name: (tuple(tensor.shape), tensor.dtype) for name, (tensor, _) in full_model().items()},
    }
    assert metadata.packages["torch"] == torch.__version__


def test_only_checkpoints_remain_in_folder(saved):
    assert sorted(entry.name for entry in saved.iterdir()) == sorted(map(str, LAYOUTS))


def _save_replicas(rank, folder):
    save(Path(folder), {str(index): torch.full((5000,), float(index)) for index in range(8)})


def test_replicated_tensors_are_written_once_and_evenly(pool, tmp_path):
    pool.run(_save_replicas, world_size=4, args=(str(tmp_path / "c"),))
    sizes = [
        entry.size
        for name, entry in read_metadata(tmp_path / "c").files.items()
        if name.endswith(".safetensors")
    ]
    assert len(sizes) == 4
    assert max(sizes) < 1.1 * min(sizes)
    assert sum(sizes) < 1.2 * 8 * 5000 * 4


def test_values_are_converted_to_target_dtype(tmp_path):
    full = torch.randn(7, 5)
    save(tmp_path / "c", {"a": full, "b": full.bfloat16()})
    target = {"a": full.bfloat16() * 0, "b": full.double() * 0}
    load_tensors(tmp_path / "c", replicated(target))
    assert torch.equal(target["a"], full.bfloat16())
    assert torch.equal(target["b"], full.bfloat16().double())
    with pytest.raises(
        CheckpointError,
        match=r"'model/a' is torch.float32 in the checkpoint, but torch.int64 in the model",
    ):
        load_tensors(tmp_path / "c", replicated({"a": full.long()}))


def test_lazy_views_are_filled_with_their_values(tmp_path):
    values = torch.randn(4, 3, dtype=torch.complex64)
    save(tmp_path / "c", {"conjugate": values, "negated": values.imag.contiguous()})
    target = {"conjugate": torch.zeros_like(values).conj()}
    target["negated"] = torch.zeros(12, dtype=torch.complex64).conj().imag[:].view(4, 3)
    load_tensors(tmp_path / "c", replicated(target))
    assert torch.equal(target["conjugate"], values)
    assert torch.equal(target["negated"], values.imag)


def test_parameters_are_filled_in_place(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(3, 4).t())
    save(tmp_path / "c", {"w": torch.arange(12.0).view(4, 3)})
    load_tensors(tmp_path / "c", replicated({"w": parameter}))
    assert torch.equal(parameter, torch.arange(12.0).view(4, 3))
    assert parameter.requires_grad


def test_mismatched_names_and_shapes_are_refused(saved):
    source = saved / "t1p1d1"
    target = blank(held(Layout(1), 0))
    target |= replicated({"h.9.new": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"'model/h\.9\.new' is not in the checkpoint"):
        load_tensors(source, target)
    assert load_tensors(source, target, strict=False) == ["model/h.9.new"]
    assert torch.equal(target["model/h.0.qkv.bias"][0], full_model()["model/h.0.qkv.bias"][0])
    with pytest.raises(
        CheckpointError,
        match=r"'model/h\.0\.qkv\.bias' has the shape \(16,\) in the checkpoint, but \(15,\)",
    ):
        load_tensors(
            source,
            replicated({"h.0.qkv.bias": torch.zeros(15)}),
            strict=False,
        )
    del target["model/h.9.new"], target["model/wte.weight"]
    assert load_tensors(source, target) == []
    with pytest.raises(
        CheckpointError, match=r"'model/wte\.weight' is in the checkpoint but not in the model"
    ):
        load_tensors(source, target, prefix="model/")
    with pytest.raises(CheckpointError, match=r"'ema/'; it has \['model/', 'state/'\]"):
        read_full(source, prefix="ema/")


def _load_where_one_rank_asks_too_much(rank, source):
    target = {"wte.weight": torch.zeros(29, 6)} | ({"nothing": torch.zeros(1)} if rank else {})
    with pytest.raises(CheckpointError) as error:
        load_tensors(source, replicated(target))
    return str(error.value)


def test_load_error_on_one_rank_is_raised_on_all_ranks(pool, saved):
    messages = pool.run(
        _load_where_one_rank_asks_too_much, world_size=2, args=(str(saved / "t2p1d1"),)
    )
    assert messages[0] == messages[1]
    assert "rank 1: 'model/nothing' is not in the checkpoint" in messages[0]
