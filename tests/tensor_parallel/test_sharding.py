"""Placements: every element of the full tensor is in exactly one piece, and padding in none."""

import pytest
import torch

from lightning_ptdp.parameters.placement import Piece, Placement, slice_full
from lightning_ptdp.tensor_parallel import VocabularyRange
from lightning_ptdp.tensor_parallel.tensor_shards import shard_columns, shard_vocabulary
from tests.tensor_parallel.toy import assemble_full

EXACT = {"rtol": 0, "atol": 0}


def full_tensor(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("parts", [(8,), (8, 4, 4), (16, 4, 4, 8)])
@pytest.mark.parametrize(("before", "after"), [((), ()), ((), (3,)), ((3,), ())])
def test_each_part_is_split_separately(size, parts, before, after):
    full, dim = full_tensor(*before, sum(parts), *after), len(before)
    shardings = [
        shard_columns(full.shape, parts=parts, size=size, index=index, dim=dim)
        for index in range(size)
    ]
    local = [slice_full(full, sharding) for sharding in shardings]
    for index, tensor in enumerate(local):
        expected = [part.chunk(size, dim)[index] for part in full.split(parts, dim)]
        torch.testing.assert_close(tensor, torch.cat(expected, dim), **EXACT)
        assert shardings[index].num_padding == 0
        assert shardings[index].sharded == ("tensor",)
    torch.testing.assert_close(assemble_full(local, shardings), full, **EXACT)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("vocabulary", [1, 5, 8, 37])
@pytest.mark.parametrize("rest", [(), (3,)])
def test_vocabulary_is_padded_with_zeros_outside_pieces(size, vocabulary, rest):
    full = full_tensor(vocabulary, *rest) + 1
    ranges = [VocabularyRange(size=vocabulary, parts=size, index=index) for index in range(size)]
    shardings = [shard_vocabulary(full.shape, words) for words in ranges]
    local = [slice_full(full, sharding) for sharding in shardings]
    rows = -(-vocabulary // size)
    assert all(tensor.shape == (rows, *rest) for tensor in local)
    assert ranges[0].padded == rows * size
    together = torch.cat(local)
    torch.testing.assert_close(together[:vocabulary], full, **EXACT)
    assert not together[vocabulary:].any()
    torch.testing.assert_close(assemble_full(local, shardings), full, **EXACT)
    assert sum(sharding.num_padding for sharding in shardings) == together.numel() - full.numel()


def test_slices_are_copies_with_same_dtype_and_device():
    full = torch.ones(4, 2, dtype=torch.bfloat16, requires_grad=True)
    local = slice_full(full, Placement.replicated(full.shape))
    assert local.dtype is torch.bfloat16
    assert not local.requires_grad
    local.zero_()
    assert full.detach().all()
    meta = slice_full(
        torch.empty(5, 2, device="meta"),
        shard_vocabulary((5, 2), VocabularyRange(size=5, parts=2, index=1)),
    )
    assert meta.is_meta
    assert meta.shape == (3, 2)


def test_placement_of_replicated_scalar():
    sharding = Placement.replicated((), partial=("tensor",))
    assert sharding.partial
    assert not sharding.sharded
    assert [(piece.in_local.slices, piece.in_full.slices) for piece in sharding.pieces] == [
        ((), ())
    ]
    assert slice_full(torch.tensor(3.0), sharding).item() == 3.0


def test_piece_outside_tensor_is_refused():
    with pytest.raises(AssertionError, match=r"\[2:5\] is outside the shape \(4,\)"):
        Placement(
            full_shape=(4,), local_shape=(3,), pieces=(Piece(local=(0,), full=(2,), size=(3,)),)
        )
