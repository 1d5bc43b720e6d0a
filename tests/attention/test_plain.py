"""Single-process attention, masks and the table of attention kinds."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from lightning_ptdp.attention import (
    ATTENTIONS,
    AttentionKind,
    KeyedAttention,
    document_mask,
    find_documents,
    intercepted,
)
from lightning_ptdp.attention.attention_protocol import AttentionCall, plain_attention
from lightning_ptdp.base.torch_calls import Replacing


def inputs(kv_heads=4):
    torch.manual_seed(0)
    return [torch.randn(2, heads, 6, 8).double() for heads in (4, kv_heads, kv_heads)]


def hidden_keys(dtype):
    """Return a mask that hides the last key of the second sample."""
    seen = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    seen[1, ..., -1] = False
    return seen if dtype is torch.bool else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bool, torch.float64])
def test_keyed_attention_without_dropout_matches_plain_attention(dtype, causal, kv_heads):
    options = {"causal": causal, "scale": 0.3}
    if dtype is not None:
        options["mask"] = hidden_keys(dtype).to(dtype)
    qkv = inputs(kv_heads)
    keyed = KeyedAttention(lambda weights, p: torch.full_like(weights, 1 - p))
    found = keyed(AttentionCall(*qkv, **options, dropout_p=0.5))
    torch.testing.assert_close(found, 0.5 * plain_attention(AttentionCall(*qkv, **options)))


def test_mask_and_causal_mask_are_combined():
    q, k, v = inputs()
    past = torch.ones(6, 6, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=hidden_keys(torch.bool) & past)
    call = AttentionCall(q, k, v, causal=True, mask=hidden_keys(torch.bool))
    torch.testing.assert_close(plain_attention(call), expected)


def test_sdpa_call_is_intercepted_as_attention_call():
    q, k, v = inputs(2)
    calls = []

    def attention(call):
        calls.append(call)
        return plain_attention(call)

    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    with Replacing(intercepted(attention)):
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    assert torch.equal(found, expected)
    (call,) = calls
    assert (call.causal, call.mask, call.factor, call.dropout_p) == (True, None, 0.2, 0.0)
    assert AttentionCall(q, k, v).factor == pytest.approx(8**-0.5)


def test_document_mask_of_packed_sequences():
    documents = find_documents(torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]]))
    assert documents.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    found = document_mask(documents, torch.tensor([1, 3]))  # queries of one rank
    assert found[:, 0].int().tolist() == [
        [[1, 1, 0, 0], [1, 1, 1, 1]],
        [[1, 1, 0, 0], [0, 0, 1, 1]],
    ]


def test_attention_table_covers_every_kind():
    assert set(ATTENTIONS) == set(get_args(AttentionKind))
