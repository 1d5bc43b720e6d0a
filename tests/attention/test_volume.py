"""Communication volume and activation memory of context parallelism."""

import math

import pytest
import torch

from lightning_ptdp.attention import ATTENTIONS
from lightning_ptdp.attention.attention_protocol import AttentionCall
from tests.context_parallel.toy import context_group, counted_messages, own, qkv


def _count(rank, kind, causal, dtype, kv_heads):
    group = context_group(rank)
    q, k, v, grad = (
        own(x, 2, group) for x in qkv(heads=4, kv_heads=kv_heads, length=16, dtype=dtype)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with counted_messages() as forward:
        output = ATTENTIONS[kind](group)(AttentionCall(*inputs, causal=causal))
    with counted_messages() as backward:
        output.backward(grad)
    return forward, backward


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
def test_communication_volume_matches_formulas(pool, kind, size, dtype):
    for causal, kv_heads in ((True, 4), (False, 2)):
        # Ring: 2 (c-1) blocks of keys and values in forward; the same blocks and their gradients,
        # in at least 32 bits, in backward. All-to-all: (c-1)/c of q, k and v in one message, and of
        # the output in another, in each direction, with keys and values repeated to a multiple of c heads.
        head, bytes_each = 2 * (16 // size) * 8, dtype.itemsize
        if kind == "ring":
            blocks = 2 * (size - 1) * kv_heads * head
            expected = (
                (blocks * bytes_each, size - 1),
                (blocks * (bytes_each + max(4, bytes_each)), 2 * (size - 1)),
            )
        else:
            sent = 2 * (4 + math.lcm(kv_heads, size)) * head * bytes_each // size * (size - 1)
            expected = (sent, 2), (sent, 2)
        for counted in pool.run(_count, world_size=size, args=(kind, causal, dtype, kv_heads)):
            assert tuple((one["bytes"], one["messages"]) for one in counted) == expected


def _saved_bytes(rank, length):
    group = context_group(rank)
    q, k, v, _ = (
        own(x, 2, group)
        for x in qkv(heads=4, kv_heads=2, length=length, dtype=torch.float32, channels=16)
    )
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        ATTENTIONS["ring"](group)(
            AttentionCall(*(x.requires_grad_() for x in (q, k, v)), causal=True)
        )
    return sum(kept.values())


def test_memory_of_ring_attention_is_sharded_over_ranks(pool):
    samples, length, heads, kv_heads, channels = 2, 64, 4, 2, 16
    # q and out, k and v, log-sum-exp
    whole = 4 * samples * length * (2 * heads * channels + 2 * kv_heads * channels + heads)
    for size in (2, 4):
        assert pool.run(_saved_bytes, world_size=size, args=(length,)) == [whole // size] * size
    # At fixed memory per rank, the sequence length scales with the number of ranks.
    assert (
        pool.run(_saved_bytes, world_size=4, args=(2 * length,))
        == pool.run(_saved_bytes, world_size=2, args=(length,)) * 2
    )
