"""Loading reads only the bytes that a rank needs."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptdp.checkpoint import load_tensors
from lightning_ptdp.checkpoint.local_rectangles import cut_strips, rectangles_of
from lightning_ptdp.checkpoint.save import write_checkpoint
from lightning_ptdp.checkpoint.stored_tensor import runs
from lightning_ptdp.parameters.placement import Placement, slice_full
from lightning_ptdp.tensor_parallel.tensor_shards import shard_columns
from tests.checkpoint.layouts import PADDING, save, shard

SHAPES = {
    "column": (2048, 2048),
    "row": (2048, 1536),
    "vocabulary": (5001, 1024),
    "fused": (3072, 1024),
    "replicated": (777,),
}


def _bytes_read():
    """Return the number of bytes that this process has read, by any system call."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    full = {kind: torch.randn(shape, generator=generator) for kind, shape in SHAPES.items()}
    path = save(tmp_path_factory.mktemp("partial") / "c", full)
    return path, full


def _cut(kind, full, size, index):
    if kind != "fused":
        return shard(full, kind, size=size, rank=index)
    sharding = shard_columns(full.shape, parts=(1024, 1024, 1024), size=size, index=index)
    return slice_full(full, sharding), sharding


@pytest.mark.parametrize("size", [2, 4])
def test_resharding_reads_only_needed_bytes(whole, size):
    path, full = whole
    read = needed = 0
    for index in range(size):
        expected = {f"model/{kind}": _cut(kind, value, size, index) for kind, value in full.items()}
        found = {
            name: (torch.full_like(value, PADDING), sharding)
            for name, (value, sharding) in expected.items()
        }
        before = _bytes_read()
        load_tensors(path, found)
        read += _bytes_read() - before
        for name, (value, sharding) in expected.items():
            needed += (
                sum(torch.Size(piece.size).numel() for piece in sharding.pieces)
                * value.element_size()
            )
            assert torch.equal(
                found[name][0][: sharding.pieces[0].size[0]], value[: sharding.pieces[0].size[0]]
            ), name
    assert needed <= read < 1.05 * needed


def test_strips_of_shard_align_with_strips_of_full_tensor():
    full = torch.arange(2048.0 * 1536).view(2048, 1536)
    offsets = {
        strip.offset
        for strip in cut_strips(rectangles_of({"w": (full, Placement.replicated((2048, 1536)))}))
    }
    assert offsets == {(0, 192 * strip) for strip in range(8)}
    for index in range(2):
        sharding = shard_columns(full.shape, parts=full.shape[1:], size=2, index=index, dim=1)
        strips = list(
            cut_strips(rectangles_of({"w": (full[:, index * 768 : index * 768 + 768], sharding)}))
        )
        assert {strip.offset for strip in strips} == {
            (0, 192 * number) for number in range(4 * index, 4 * index + 4)
        }
        for strip in strips:
            assert torch.equal(strip.values, full[:, strip.offset[1] : strip.offset[1] + 192])


def test_tall_matrix_is_cut_only_by_ranks_that_split_its_columns(tmp_path):
    full = torch.randn(8192, 1024, generator=torch.Generator().manual_seed(0))

    def part(size, index):
        return shard_columns(full.shape, parts=[1024], size=size, index=index, dim=1)

    halves = [
        rectangle
        for placement in (part(2, 0), part(2, 1))
        for rectangle in rectangles_of({"model/w": (slice_full(full, placement), placement)})
    ]
    assert len(list(cut_strips(halves))) == 8
    rows = shard_columns(full.shape, parts=[8192], size=2, index=0)
    flat = rows.flattened(1000, 500_000)
    for placement, values in ((rows, full[:4096]), (flat, full.flatten()[1000:500_000])):
        held = rectangles_of({"model/w": (values, placement)})
        assert len(list(cut_strips(held))) == len(held)
    path = tmp_path / "tall"
    write_checkpoint(path, rectangles=halves, state={}, metadata={})
    for index in range(4):
        found = torch.empty(8192, 256)
        before = _bytes_read()
        load_tensors(path, {"model/w": (found, part(4, index))})
        assert found.nbytes <= _bytes_read() - before < 1.01 * found.nbytes
        assert torch.equal(found, full[:, 256 * index : 256 * index + 256])


@settings(deadline=None)
@given(
    data=st.data(),
    shape=st.lists(st.integers(1, 5), max_size=4),
    itemsize=st.sampled_from([1, 4, 5000]),
)
def test_runs_contain_rectangle(data, shape, itemsize):
    offset = [data.draw(st.integers(0, extent - 1)) for extent in shape]
    size = [
        data.draw(st.integers(1, extent - begin))
        for extent, begin in zip(shape, offset, strict=True)
    ]
    places = torch.arange(torch.Size(shape).numel()).view(shape)
    index = tuple(slice(begin, begin + extent) for begin, extent in zip(offset, size, strict=True))
    found = list(runs(shape, offset, size, itemsize=itemsize))
    inside = {place for begin, end in found for place in range(begin // itemsize, end // itemsize)}
    wanted = set(places[index].flatten().tolist())
    assert wanted <= inside
    assert found == sorted(found)
    if itemsize == 5000 and len(shape) == 1:
        assert wanted == inside
