"""Zigzag layout of sequence chunks."""

import pytest
import torch

from lightning_ptdp.attention import check_sequence, gather_sequence, positions, shard_sequence
from lightning_ptdp.attention.sequence_chunks import unshard_sequence
from tests.context_parallel.toy import context_group


def test_rank_holds_two_mirrored_chunks():
    assert [positions(8, rank, 2).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [positions(8, rank, 4).tolist() for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_causal_work_is_equal_on_all_ranks(size):
    seen = [(positions(24, rank, size) + 1).sum().item() for rank in range(size)]
    assert set(seen) == {24 * 25 / 2 / size}


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_unshard_inverts_shard(size, dim):
    x = torch.randn(8, 16, 24)
    assert torch.equal(
        unshard_sequence([shard_sequence(x, dim, rank=r, size=size) for r in range(size)], dim), x
    )


def test_shard_is_differentiable():
    x = torch.zeros(8, requires_grad=True)
    shard_sequence(x, 0, rank=1, size=2).sum().backward()
    assert x.grad.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("length", "size", "tensor", "message"),
    [
        (10, 4, 1, "multiple of 8. Pad or truncate it to 8 or 16"),
        (3, 2, 1, "to 4 tokens"),
        (8, 2, 4, None),
        (12, 2, 4, "over 4 ranks"),
    ],
)
def test_indivisible_sequence_length_is_refused(length, size, tensor, message):
    if message is None:
        check_sequence(length, size, sequence_parallel_size=tensor)
        return
    with pytest.raises(ValueError, match=message):
        check_sequence(length, size, sequence_parallel_size=tensor)


def test_single_rank_accepts_any_length():
    check_sequence(7, 1)


def _gather(rank):
    group = context_group(rank)
    x = torch.arange(16).view(2, 8)
    return gather_sequence(
        shard_sequence(x, 1, rank=rank, size=group.size), 1, group=group
    ).tolist()


def test_gather_restores_whole_sequence(pool):
    assert pool.run(_gather, world_size=2) == [torch.arange(16).view(2, 8).tolist()] * 2
