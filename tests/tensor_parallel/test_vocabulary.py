"""Embeddings, output head and positions against a single process, with divisible and indivisible
vocabularies."""

from copy import deepcopy
from functools import partial
from itertools import product

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
)
from tests.tensor_parallel.toy import (
    assert_gradients,
    compare_passes,
    everything,
    own_slice,
    sequence_slice,
    shard,
    tensor_group,
)

B, S, H = 2, 8, 4


def embedding_case(group, *, vocabulary, padding_idx, sequence_parallel, dtype):
    torch.manual_seed(1)
    reference = nn.Embedding(vocabulary, H, padding_idx=padding_idx, dtype=dtype)
    ids, grad = torch.randint(vocabulary, (B, S)), torch.randn(B, S, H, dtype=dtype)
    ids[0, 0] = vocabulary - 1
    layer, shardings = shard(
        deepcopy(reference), Vocabulary(), group, sequence_parallel=sequence_parallel
    )
    assert isinstance(layer, VocabularyParallelEmbedding)
    assert layer.padded_vocabulary == -(-vocabulary // group.size) * group.size
    forward, backward = compare_passes(
        layer,
        reference,
        ids,
        grad,
        own_input=everything,
        own_output=sequence_slice(group, sequence_parallel),
    )
    assert forward == {"reduce_scatter" if sequence_parallel else "all_reduce": 1}
    assert backward == ({"all_gather": 1} if sequence_parallel else {})
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
    layer, shardings = shard(
        deepcopy(reference), Vocabulary(), group, sequence_parallel=sequence_parallel
    )
    assert isinstance(layer, VocabularyParallelHead)

    def gathered(x):
        logits = layer(x)
        assert isinstance(logits, VocabularyParallelLogits)
        assert logits.shape == grad.shape
        full = gather_full(logits)
        assert type(full) is torch.Tensor
        return full

    own_input = sequence_slice(group, sequence_parallel)
    compare_passes(gathered, reference, x, grad, own_input=own_input, own_output=everything)
    assert_gradients(layer, shardings, reference, group)


def position_case(group, shape):
    torch.manual_seed(3)
    reference = nn.Embedding(2 * S, H, padding_idx=3)
    positions, grad = torch.randint(2 * S, shape), torch.randn(*shape, H)
    layer, shardings = shard(deepcopy(reference), Position(), group, sequence_parallel=True)
    assert isinstance(layer, SequenceShardedEmbedding)
    own_output = partial(own_slice, group=group, dim=-2)
    forward, backward = compare_passes(
        layer, reference, positions, grad, own_input=everything, own_output=own_output
    )
    assert not forward and not backward
    assert shardings["weight"].partial
    assert_gradients(layer, shardings, reference, group)
    same, shardings = shard(reference, Position(), group)
    assert same is reference
    assert not shardings["weight"].partial


def check_all(rank):
    group = tensor_group(rank)
    # 5 over 4 ranks: two rows each, the last rank has only padding
    for sequence_parallel, dtype, vocabulary in product(
        (False, True), (torch.float32, torch.float64), (5, 8, 13)
    ):
        options = {
            "vocabulary": vocabulary,
            "sequence_parallel": sequence_parallel,
            "dtype": dtype,
        }
        for padding_idx in (None, 0, vocabulary - 1):
            embedding_case(group, padding_idx=padding_idx, **options)
        for bias in (False, True):
            head_case(group, bias=bias, **options)
    for shape in ((S,), (1, S), (B, S)):
        position_case(group, shape)
    layer, _ = shard(nn.Embedding(8, H), Position(), group, sequence_parallel=True)
    with pytest.raises(ValueError, match=f"length 3 .*tensor_parallel_size={group.size}"):
        layer(torch.arange(3))


def check_tied(rank):
    group = tensor_group(rank)
    embedding, head = nn.Embedding(5, H), nn.Linear(H, 5, bias=False)
    head.weight = embedding.weight
    embedding.weight.no_decay = True
    shared = {}
    first, _ = shard(embedding.eval(), Vocabulary(), group, shared=shared)
    second, _ = shard(head, Vocabulary(), group, shared=shared)
    assert first.weight is second.weight
    assert first.weight.no_decay
    assert not first.training
    assert second.training
    whole = nn.Linear(H, 5, device="meta", dtype=torch.bfloat16)
    meta, shardings = shard(whole, Vocabulary(), group)
    for name, parameter in meta.named_parameters():
        assert parameter.is_meta
        assert parameter.dtype is torch.bfloat16
        assert tuple(parameter.shape) == shardings[name].local_shape


@pytest.mark.parametrize("size", [2, 4])
def test_vocabulary_layers_match_single_process(pool, size):
    pool.run(check_all, world_size=size)
    pool.run(check_tied, world_size=size)
