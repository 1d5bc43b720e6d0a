"""Attention on one block of queries and keys, with the log-sum-exp of each row.

The log-sum-exp is needed to combine blocks. torch's fused kernels return it, and their backwards
take it as an argument, but only under private names. These names are used in this file alone
(tests/attention/test_kernels.py checks them)::

    CPU                            flash attention for CPUs
    GPU, half precision, no bias   FlashAttention
    GPU, with a bias or float32    memory-efficient attention, whose bias may hide padding and
                                   other documents
    all else                       ``_plain``, which is correct everywhere: dropout, float64,
                                   unusual head sizes, other devices

cuDNN's kernel, which torch prefers on Hopper for whole sequences, is not used for blocks: it is not
documented that its backward accepts the log-sum-exp of a row that continues in other blocks.

Blockwise attention relies on this property: given the output and the log-sum-exp of the *full* row,
a backward computes exactly this block's share of the gradients (arXiv 2310.01889, section 3; arXiv
2205.14135, appendix B.2).

Shapes: b samples, n heads, m key/value heads (m divides n), q queries, k keys, d channels per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE_ELEMENTS = 2**24
"""Scores that ``_plain`` holds at a time: 64 MiB in float32, plus a few copies."""
_ALIGNED = 8
_ALIGNED_ROWS = 32
"""Multiples of which CUDA's kernels need the channels or keys, and the rows' log-sum-exps."""


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
    if kernel is None:
        return _plain(q, k, v, block)
    if kernel == "flash":
        op = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse = op(q, k, v, 0.0, block.causal, False, scale=block.scale)[:2]
        return out, lse
    k, v = (_repeat(x, q) for x in (k, v))
    if kernel == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(q, k, v, 0.0, block.causal, attn_mask=block.bias, scale=block.scale)
    else:
        op = torch.ops.aten._scaled_dot_product_efficient_attention
        bias = _aligned_bias(q, k, block)
        out, lse = op(q, k, v, bias, True, 0.0, block.causal, scale=block.scale)[:2]
        lse = lse[..., : q.size(2)]
    if block.bias is None:
        return out, lse
    blind = _blind(block)
    return out.masked_fill_(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)


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
    grad = grad.contiguous()
    if kernel == "flash":
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
            lse.contiguous(),
            None,
            None,
            *lengths,
            0.0,
            block.causal,
            rng,
            rng,
            scale=block.scale,
        )
    inputs = (grad, q, _repeat(k, q), _repeat(v, q))
    lse = _finite(lse).contiguous()
    if kernel == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = op(*inputs, out, lse, 0.0, block.causal, attn_mask=block.bias, scale=block.scale)
    else:
        op = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        lse = F.pad(lse, (0, -lse.size(2) % _ALIGNED_ROWS), value=torch.inf)
        rng = torch.empty((), dtype=torch.int64)
        options = (rng, rng, 0.0, [True, True, True, False], block.causal)
        bias = _aligned_bias(q, k, block)
        grads = op(*inputs, bias, out, lse, *options, scale=block.scale)
    return grads[0], _sum_repeated(grads[1], k), _sum_repeated(grads[2], k)


def fused_kernel(q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> str | None:
    """Return the fused kernel that supports this block: "cpu", "flash", "efficient" or None."""
    single = q.dtype is torch.float32
    if (
        block.dropout_p
        or q.size(-1) != v.size(-1)
        or not (single or q.dtype in (torch.bfloat16, torch.float16))
        or (block.bias is not None and block.bias.dtype is not torch.float32)
    ):
        return None
    if q.device.type == "cpu":
        return "cpu"
    if not q.is_cuda or q.size(-1) % _ALIGNED:
        return None
    can = torch.backends.cuda
    if block.bias is None and not single:
        grouped = q.size(1) != k.size(1)
        if can.can_use_flash_attention(can.SDPAParams(q, k, v, None, 0.0, block.causal, grouped)):
            return "flash"
    # The repeated keys have the form of the queries, except for their number.
    full = can.SDPAParams(q, q, q, None, 0.0, block.causal, False)
    # ROCm's log-sum-exp has another form.
    supports = torch.version.hip is None and can.can_use_efficient_attention(full)
    return "efficient" if supports else None


def _aligned_bias(q: Tensor, k: Tensor, block: AttentionBlock) -> Tensor | None:
    """Return the bias (b, n, q, k) as memory-efficient attention needs it.

    It has the dtype of ``q``, rows at multiples of 8 elements, and no -inf: a row that hides all
    keys would become NaN. (Half of the minimum, because the kernel multiplies by log2(e).)
    """
    if block.bias is None:
        return None
    length = k.size(2)
    bias = block.bias.to(q.dtype).clamp(min=torch.finfo(q.dtype).min / 2)
    bias = F.pad(bias, (0, -length % _ALIGNED)).contiguous()[..., :length]
    return bias.expand(*q.shape[:3], length)


def _repeat(x: Tensor, q: Tensor) -> Tensor:
    """Repeat key or value heads to the number of query heads."""
    heads = q.size(1) // x.size(1)
    return x if heads == 1 else x.repeat_interleave(heads, dim=1)


def _sum_repeated(grad: Tensor, k: Tensor) -> Tensor:
    return grad if grad.size(1) == k.size(1) else torch.unflatten(grad, 1, (k.size(1), -1)).sum(2)


def _plain(q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (_repeat(x, q).to(dtype) for x in (q, k, v))
    out = q.new_empty((*q.shape[:3], v.size(-1)))
    lse = q.new_empty(q.shape[:3])
    for rows, keys in _tiles(q, k, block):
        scores = _scores(q, k, block, rows, keys)
        lse[:, :, rows] = scores.logsumexp(-1)
        weights = _weights(scores, lse[:, :, rows])
        if block.dropout_p:
            weights = weights * _kept(weights, block, rows)
        out[:, :, rows] = weights.matmul(v[:, :, keys])
    return out, lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: AttentionBlock
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    shared = k
    q, k, v, grad, out = (_repeat(x, q).to(dtype) for x in (q, k, v, grad, out))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    delta = (grad * out).sum(-1, keepdim=True)
    for rows, keys in _tiles(q, k, block):
        weights = _weights(_scores(q, k, block, rows, keys), lse[:, :, rows])
        grad_weights = grad[:, :, rows].matmul(v[:, :, keys].mT)
        dropped = weights
        if block.dropout_p:
            dropout_mask = _kept(weights, block, rows)
            grad_weights = grad_weights * dropout_mask
            dropped = weights * dropout_mask
        dv[:, :, keys] += dropped.mT.matmul(grad[:, :, rows])
        grad_scores = weights * (grad_weights - delta[:, :, rows]) * block.scale
        dq[:, :, rows] = grad_scores.matmul(k[:, :, keys])
        dk[:, :, keys] += grad_scores.mT.matmul(q[:, :, rows])
    return dq, _sum_repeated(dk, shared), _sum_repeated(dv, shared)


def _tiles(q: Tensor, k: Tensor, block: AttentionBlock) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of queries to compute together, and the keys visible to them."""
    length = q.size(2)
    step = max(1, _TILE_ELEMENTS // max(1, q.size(0) * q.size(1) * k.size(2)))
    for start in range(0, length, step):
        stop = min(start + step, length)
        yield slice(start, stop), slice(0, stop if block.causal else k.size(2))


def _scores(q: Tensor, k: Tensor, block: AttentionBlock, rows: slice, keys: slice) -> Tensor:
    """Return the scores (b, n, rows, keys)."""
    scores = q[:, :, rows].matmul(k[:, :, keys].mT).mul_(block.scale)
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
