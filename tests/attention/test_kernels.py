"""Block attention: fused kernels match the plain kernel, and blocks combine to full attention.
These tests also detect changes of torch's private names."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from lightning_ptdp.attention import kernels
from lightning_ptdp.attention.kernels import (
    AttentionBlock,
    attend,
    attend_backward,
    fused_kernel,
)
from tests.context_parallel.toy import assert_close, qkv

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
SCALE = 1 / math.sqrt(8)


def reference(q, k, v, block):
    """Return output and log-sum-exp, computed from the definition."""
    heads = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
    scores = q @ k.transpose(-1, -2) * block.scale
    if block.bias is not None:
        scores = scores + block.bias
    if block.causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf
        )
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ v, scores.logsumexp(
        -1
    )


def make_block(name):
    bias = torch.randn(2, 1, 1, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    hidden = bias.masked_fill(torch.arange(12) > 4, -torch.inf)
    blind = torch.zeros(2, 1, 12, 12, dtype=torch.float64)
    blind[0, 0, 3] = -torch.inf
    return {
        "full": AttentionBlock(scale=SCALE),
        "causal": AttentionBlock(scale=SCALE, causal=True),
        "bias": AttentionBlock(scale=0.3, bias=hidden),
        "causal bias": AttentionBlock(scale=SCALE, causal=True, bias=bias),
        "blind row": AttentionBlock(scale=SCALE, bias=blind),
    }[name]


@pytest.mark.parametrize("tile", [2**24, 100], ids=["one tile", "tiles"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", ["full", "causal", "bias", "causal bias", "blind row"])
def test_plain_kernel_matches_reference(name, kv_heads, tile):
    q, k, v, grad = qkv(heads=4, kv_heads=kv_heads, length=12, dtype=torch.float64)
    block = make_block(name)
    assert fused_kernel(q, k, v, block) is None
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = reference(*inputs, block)
    with patch.object(kernels, "_TILE_ELEMENTS", tile):
        out, lse = attend(q, k, v, block)
        found = attend_backward(grad, q, k, v, out, lse, block)
    assert_close(out, expected.detach())
    assert_close(lse, expected_lse.detach())
    for mine, whole in zip(found, torch.autograd.grad(expected, inputs, grad), strict=True):
        assert_close(mine, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_fused_kernels_match_plain_kernel(device, bias, causal, kv_heads, dtype):
    q, k, v, grad = (x.to(device) for x in qkv(heads=4, kv_heads=kv_heads, length=16, dtype=dtype))
    if not causal:
        k, v = k[:, :, :6], v[:, :, :6]
    hidden = torch.zeros(2, 1, 16, k.size(2), device=device)
    hidden[0, :, :, :3] = -torch.inf  # with a causal mask, the first three queries see no key
    hidden[1, :, 5] = -torch.inf
    block = AttentionBlock(scale=SCALE, causal=causal, bias=hidden if bias else None)
    if fused_kernel(q, k, v, block) is None:
        assert device == "cuda", "the fused CPU kernel must support this case"
        pytest.skip(f"no fused kernel for {dtype} on {device}, bias={bias}")
    assert fused_kernel(q, k, v, block) in (device, "flash", "efficient")
    out, lse = attend(q, k, v, block)
    found = (out, lse, *attend_backward(grad, q, k, v, out, lse, block))
    exact = [x.double() for x in (q, k, v, grad)]
    exact_out, exact_lse = attend(*exact[:3], block)
    expected = (
        exact_out,
        exact_lse,
        *attend_backward(exact[3], *exact[:3], exact_out, exact_lse, block),
    )
    assert lse.dtype == torch.float32
    for mine, whole in zip(found, expected, strict=True):
        assert_close(
            mine.double(), whole, torch.float32 if dtype is torch.float32 else torch.bfloat16
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_block_backward_with_full_lse_gives_partial_gradients(dtype):
    q, k, v, grad = qkv(heads=2, kv_heads=2, length=16, dtype=dtype)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*inputs)
    dq, dk, dv = torch.autograd.grad(out, inputs, grad)
    block = AttentionBlock(scale=SCALE)
    lse = attend(q, k, v, block)[1]
    halves = [slice(0, 8), slice(8, 16)]
    shares = [
        attend_backward(grad, q, k[:, :, half], v[:, :, half], out.detach(), lse, block)
        for half in halves
    ]
    assert_close(shares[0][0] + shares[1][0], dq)
    for half, share in zip(halves, shares, strict=True):
        assert_close(share[1], dk[:, :, half])
        assert_close(share[2], dv[:, :, half])


def test_backward_reuses_dropout_mask_of_forward():
    q, k, v, _ = qkv(heads=2, kv_heads=1, length=16, dtype=torch.float64)
    block = AttentionBlock(scale=0.0, dropout_p=0.5, seed=3)
    out, lse = attend(q, k, v, block)
    again, _ = attend(q, k, v, block)
    other, _ = attend(q, k, v, AttentionBlock(scale=0.0, dropout_p=0.5, seed=4))
    assert torch.equal(out, again)
    assert not torch.equal(out, other)
    # With equal weights the output is linear in v, so its gradient shows the kept weights.
    dv = attend_backward(torch.ones_like(out), q, k, v, out, lse, block)[2]
    assert_close((dv * v).sum(), out.sum())


def test_unsupported_blocks_do_not_use_fused_kernel():
    q, k, v, _ = qkv(heads=2, kv_heads=2, length=8, dtype=torch.float32)
    assert fused_kernel(q, k, v, AttentionBlock(scale=1.0)) == "cpu"
    exact = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    assert fused_kernel(q, k, v, AttentionBlock(scale=1.0, bias=exact)) is None
    assert fused_kernel(q, k, v, AttentionBlock(scale=1.0, dropout_p=0.1)) is None
    assert fused_kernel(q, k, v[..., :4], AttentionBlock(scale=1.0)) is None
