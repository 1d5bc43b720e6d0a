"""Embeddings, output head and positions against a single process, with divisible and indivisible
vocabularies."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from lightning_ptdp.tensor_parallel import (
    Position,
    SequenceShardedEmbedding,
    Vocabulary,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    VocabularyParallelLogits,
    gather_full,
    shard_module,
)
from lightning_ptdp.tensor_parallel.kinds import ModulePlace
from lightning_ptdp.world.mesh import Group
from tests.tensor_parallel.toy import (
    assert_gradients,
    assert_same,
    counted_collectives,
    own_slice,
    tensor_group,
)

B, S, H = 2, 8, 4


def embedding_case(group, *, vocabulary, padding_idx, sequence_parallel, dtype):
    torch.manual_seed(1)
    reference = nn.Embedding(vocabulary, H, padding_idx=padding_idx, dtype=dtype)
    ids, grad = torch.randint(vocabulary, (B, S)), torch.randn(B, S, H, dtype=dtype)
    ids[0, 0] = vocabulary - 1
    layer, shardings = shard_module(
        deepcopy(reference),
        Vocabulary(),
        ModulePlace(group=group, sequence_parallel=sequence_parallel, shared={}),
    )
    assert isinstance(layer, VocabularyParallelEmbedding)
    assert layer.padded_vocabulary == -(-vocabulary // group.size) * group.size
    expected = reference(ids)
    expected.backward(grad)
    with counted_collectives() as counts:
        y = layer(ids)
    assert counts == {"reduce_scatter" if sequence_parallel else "all_reduce": 1}
    with counted_collectives() as counts:
        y.backward(own_slice(grad, group, 1) if sequence_parallel else grad)
    assert counts == ({"all_gather": 1} if sequence_parallel else {})
    assert_same(y, own_slice(expected, group, 1) if sequence_parallel else expected)
    assert_gradients(layer, shardings, reference, group)
    assert not shardings["weight"].partial
    assert not layer.weight.grad[layer.vocabulary.count :].any()
    for bad in (-1, vocabulary):
        with pytest.raises(IndexError):
            layer(torch.full((B, S), bad))


def head_case(group, *, vocabulary, bias, sequence_parallel, dtype):
    torch.manual_seed(2)
    reference = nn.Linear(H, vocabulary, bias=bias, dtype=dtype)
    x, grad = torch.randn(B, S, H, dtype=dtype), torch.randn(B, S, vocabulary, dtype=dtype)
    layer, shardings = shard_module(
        deepcopy(reference),
        Vocabulary(),
        ModulePlace(group=group, sequence_parallel=sequence_parallel, shared={}),
    )
    assert isinstance(layer, VocabularyParallelHead)
    full_x = x.clone().requires_grad_()
    expected = reference(full_x)
    expected.backward(grad)
    own_x = (own_slice(x, group, 1) if sequence_parallel else x).clone().requires_grad_()
    logits = layer(own_x)
    assert isinstance(logits, VocabularyParallelLogits)
    assert logits.shape == expected.shape
    full = gather_full(logits)
    assert type(full) is torch.Tensor
    assert_same(full, expected)
    full.backward(grad)
    assert own_x.grad is not None
    assert full_x.grad is not None
    assert_same(own_x.grad, own_slice(full_x.grad, group, 1) if sequence_parallel else full_x.grad)
    assert_gradients(layer, shardings, reference, group)


def position_case(group, shape):
    torch.manual_seed(3)
    reference = nn.Embedding(2 * S, H, padding_idx=3)
    positions = torch.randint(2 * S, shape)
    layer, shardings = shard_module(
        deepcopy(reference), Position(), ModulePlace(group=group, sequence_parallel=True, shared={})
    )
    assert isinstance(layer, SequenceShardedEmbedding)
    expected = reference(positions)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    with counted_collectives() as counts:
        y = layer(positions)
        y.backward(own_slice(grad, group, -2))
    assert not counts
    assert_same(y, own_slice(expected, group, -2))
    assert shardings["weight"].partial
    assert_gradients(layer, shardings, reference, group)
    same, shardings = shard_module(
        reference, Position(), ModulePlace(group=group, sequence_parallel=False, shared={})
    )
    assert same is reference
    assert not shardings["weight"].partial


def check_all(rank):
    group = tensor_group(rank)
    for sequence_parallel in (False, True):
        for dtype in (torch.float32, torch.float64):
            # 5 over 4 ranks: two rows each, the last rank has only padding
            for vocabulary in (5, 8, 13):
                for padding_idx in (None, 0, vocabulary - 1):
                    embedding_case(
                        group,
                        vocabulary=vocabulary,
                        padding_idx=padding_idx,
                        sequence_parallel=sequence_parallel,
                        dtype=dtype,
                    )
                for bias in (False, True):
                    head_case(
                        group,
                        vocabulary=vocabulary,
                        bias=bias,
                        sequence_parallel=sequence_parallel,
                        dtype=dtype,
                    )
    for shape in ((S,), (1, S), (B, S)):
        position_case(group, shape)
    layer, _ = shard_module(
        nn.Embedding(8, H), Position(), ModulePlace(group=group, sequence_parallel=True, shared={})
    )
    with pytest.raises(ValueError, match=f"length 3 .*tensor_parallel_size={group.size}"):
        layer(torch.arange(3))


def check_tied(rank):
    group = tensor_group(rank)
    embedding, head = nn.Embedding(5, H), nn.Linear(H, 5, bias=False)
    head.weight = embedding.weight
    embedding.weight.no_decay = True
    shared = {}
    first, _ = shard_module(
        embedding.eval(),
        Vocabulary(),
        ModulePlace(group=group, sequence_parallel=False, shared=shared),
    )
    second, _ = shard_module(
        head, Vocabulary(), ModulePlace(group=group, sequence_parallel=False, shared=shared)
    )
    assert first.weight is second.weight
    assert first.weight.no_decay
    assert not first.training
    assert second.training
    meta, shardings = shard_module(
        nn.Linear(H, 5, device="meta", dtype=torch.bfloat16),
        Vocabulary(),
        ModulePlace(group=group, sequence_parallel=False, shared={}),
    )
    for name, parameter in meta.named_parameters():
        assert parameter.is_meta
        assert parameter.dtype is torch.bfloat16
        assert tuple(parameter.shape) == shardings[name].local_shape


@pytest.mark.parametrize("size", [2, 4])
def test_vocabulary_layers_match_single_process(pool, size):
    pool.run(check_all, world_size=size)
    pool.run(check_tied, world_size=size)


def test_group_of_one_leaves_vocabulary_layers_unchanged():
    for module, kind in (
        (nn.Embedding(5, H), Vocabulary()),
        (nn.Linear(H, 5), Vocabulary()),
        (nn.Embedding(5, H), Position()),
    ):
        same, shardings = shard_module(
            module, kind, ModulePlace(group=Group(), sequence_parallel=True, shared={})
        )
        assert same is module
        assert all(not sharding.sharded and not sharding.partial for sharding in shardings.values())
