"""Attention on one block of queries and keys, with the log-sum-exp of each row.

The log-sum-exp is needed to combine blocks. torch's fused kernels return it, and their backwards
take it as an argument, but only under private names. These names are used in this file alone
(tests/attention/test_kernels.py checks them). The cases that they do not cover (masks on a GPU,
dropout, float64, unusual head sizes, other devices) use ``_plain``, which is correct everywhere.

Blockwise attention relies on this property: given the output and the log-sum-exp of the *full* row,
a backward computes exactly this block's share of the gradients (arXiv 2310.01889, section 3; arXiv
2205.14135, appendix B.2).

Shapes: b samples, n heads, m key/value heads (m divides n), q queries, k keys, d channels per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_TILE_ELEMENTS = 2**24
"""Scores that ``_plain`` holds at a time: 64 MiB in float32, plus a few copies."""


@dataclass(frozen=True, kw_only=True)
class AttentionBlock:
    """Options of a block's attention.

    Attributes:
        scale: Factor on q k^T.
        causal: Query i attends to keys 0 .. i only; requires q = k.
        bias: Added to the scores, -inf where a key is hidden from a query; (b or 1, n or 1, q or 1,
            k), float32 or float64.
        dropout_p: Probability of dropping an attention weight.
        seed: Seed of the dropped weights.
    """

    scale: float
    causal: bool = False
    bias: Tensor | None = None
    dropout_p: float = 0.0
    seed: int = 0


def attend(q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Compute the attention of q (b, n, q, d) to k and v (b, m, k, d).

    Returns:
        The output (b, n, q, d), 0 for a query without visible keys, in the dtype of ``q`` or in
        float32; and the log-sum-exp of its scores (b, n, q), -inf for such a query, float32
        (float64 for float64 inputs).
    """
    kernel = fused_kernel(q, k, v, block)
    if kernel == "cpu":
        heads = q.size(1) // k.size(1)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(
            q,
            _repeat(k, heads),
            _repeat(v, heads),
            0.0,
            block.causal,
            attn_mask=block.bias,
            scale=block.scale,
        )
        # The kernel returns 0 for a query without visible keys.
        return out, lse if block.bias is None else lse.masked_fill(_blind(block), -torch.inf)
    if kernel == "cuda":
        op = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse = op(q, k, v, 0.0, block.causal, False, scale=block.scale)[:2]
        return out, lse
    return _plain(q, k, v, block)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: AttentionBlock
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's share of the gradients of q, k and v.

    Args:
        grad: Gradient of ``out`` (b, n, q, d).
        q, k, v: As in ``attend``.
        out: Output of the complete attention, over all blocks.
        lse: Log-sum-exp of the full rows, like ``out``.
        block: As in ``attend``.
    """
    kernel = fused_kernel(q, k, v, block)
    if kernel is None:
        return _plain_backward(grad, q, k, v, out, lse, block)
    lse = lse.contiguous()
    grad = grad.contiguous()
    if kernel == "cpu":
        heads = q.size(1) // k.size(1)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = op(
            grad,
            q,
            _repeat(k, heads),
            _repeat(v, heads),
            out,
            lse if block.bias is None else _finite(lse),
            0.0,
            block.causal,
            attn_mask=block.bias,
            scale=block.scale,
        )
        return grads[0], _sum_repeated(grads[1], heads), _sum_repeated(grads[2], heads)
    # Random state of a dropout; there is no dropout here.
    rng = torch.empty(2, dtype=torch.uint64, device=q.device)
    lengths = (q.size(2), k.size(2))
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return op(
        grad,
        q,
        k,
        v,
        out,
        lse,
        None,
        None,
        *lengths,
        0.0,
        block.causal,
        rng,
        rng,
        scale=block.scale,
    )


def fused_kernel(q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> str | None:
    """Return the fused kernel that supports this block: "cpu", "cuda" or None."""
    if block.dropout_p or q.size(-1) != v.size(-1):
        return None
    if q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return "cpu" if block.bias is None or block.bias.dtype is torch.float32 else None
    if (
        q.is_cuda
        and block.bias is None
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.size(-1) % 8 == 0
    ):
        parameters = torch.backends.cuda.SDPAParams(
            q, k, v, None, 0.0, block.causal, q.size(1) != k.size(1)
        )
        return "cuda" if torch.backends.cuda.can_use_flash_attention(parameters) else None
    return None


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x if heads == 1 else x.repeat_interleave(heads, dim=1)


def _sum_repeated(grad: Tensor, heads: int) -> Tensor:
    return grad if heads == 1 else torch.unflatten(grad, 1, (-1, heads)).sum(2)


def _plain(q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty((*q.shape[:3], v.size(-1)), dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
    for rows, keys in _tiles(q, k, block):
        scores = _scores(q, k, block, rows, keys)
        lse[:, :, rows] = scores.logsumexp(-1)
        weights = _weights(scores, lse[:, :, rows])
        if block.dropout_p:
            weights = weights * _kept(weights, block, rows)
        out[:, :, rows] = _unfold(_fold(weights, k).matmul(v[:, :, keys].to(dtype)), q)
    return out, lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: AttentionBlock
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (q, k, v))
    delta = (grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    for rows, keys in _tiles(q, k, block):
        weights = _weights(_scores(q, k, block, rows, keys), lse[:, :, rows])
        grad_rows = _fold(grad[:, :, rows].to(dtype), k)
        q_rows = _fold(q[:, :, rows].to(dtype), k)
        grad_weights = _unfold(grad_rows.matmul(v[:, :, keys].to(dtype).transpose(-1, -2)), q)
        dropped = weights
        if block.dropout_p:
            dropout_mask = _kept(weights, block, rows)
            grad_weights = grad_weights * dropout_mask
            dropped = weights * dropout_mask
        dv[:, :, keys] += _fold(dropped, k).transpose(-1, -2).matmul(grad_rows)
        grad_scores = _fold(weights * (grad_weights - delta[:, :, rows]) * block.scale, k)
        dq[:, :, rows] = _unfold(grad_scores.matmul(k[:, :, keys].to(dtype)), q)
        dk[:, :, keys] += grad_scores.transpose(-1, -2).matmul(q_rows)
    return dq, dk, dv


def _tiles(q: Tensor, k: Tensor, block: AttentionBlock) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of queries to compute together, and the keys visible to them."""
    length = q.size(2)
    step = max(1, _TILE_ELEMENTS // max(1, q.size(0) * q.size(1) * k.size(2)))
    for start in range(0, length, step):
        stop = min(start + step, length)
        yield slice(start, stop), slice(0, stop if block.causal else k.size(2))


def _scores(q: Tensor, k: Tensor, block: AttentionBlock, rows: slice, keys: slice) -> Tensor:
    """Return the scores (b, n, rows, keys)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    folded = _fold(q[:, :, rows].to(dtype), k).matmul(k[:, :, keys].to(dtype).transpose(-1, -2))
    scores = _unfold(folded, q).mul_(block.scale)
    if block.bias is not None:
        scores += (block.bias[..., rows, :] if block.bias.size(-2) > 1 else block.bias)[..., keys]
    if block.causal:
        ones = torch.ones(rows.stop - rows.start, keys.stop, dtype=torch.bool, device=q.device)
        scores.masked_fill_(ones.triu_(rows.start + 1), -torch.inf)
    return scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    # A query without visible keys has only scores of -inf: its weights are exp(-inf - 0) = 0, not
    # nan.
    return (scores - _finite(lse)[..., None]).exp_()


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _blind(block: AttentionBlock) -> Tensor:
    """Return the queries to which the block's bias leaves no visible key; broadcasts to (b, n, q)."""
    bias = block.bias
    assert bias is not None
    if block.causal:
        ones = torch.ones(bias.size(-1), bias.size(-1), dtype=torch.bool, device=bias.device)
        bias = bias.masked_fill(ones.triu_(1), -torch.inf)
    return (bias == -torch.inf).all(-1)


def _kept(weights: Tensor, block: AttentionBlock, rows: slice) -> Tensor:
    """Return the dropout factors of the weights: 0, or 1 / (1 - p) to keep the mean."""
    generator = torch.Generator(weights.device).manual_seed(block.seed + rows.start)
    draws = torch.rand(weights.shape, generator=generator, device=weights.device)
    return (draws >= block.dropout_p).to(weights.dtype).div_(1 - block.dropout_p)


def _fold(x: Tensor, k: Tensor) -> Tensor:
    """Join the queries that share a key head: (b, n, q, .) -> (b, m, n/m * q, .)."""
    return x.reshape(x.size(0), k.size(1), -1, x.size(-1))


def _unfold(x: Tensor, q: Tensor) -> Tensor:
    return x.reshape(x.size(0), q.size(1), -1, x.size(-1))
