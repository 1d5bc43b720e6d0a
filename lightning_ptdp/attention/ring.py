"""Ring attention: queries stay, keys and values are passed around the ranks.

See arXiv 2310.01889; the zigzag layout is that of arXiv 2407.21783, section 3.3.2.

In c steps a rank sees the keys and values of every rank. While it computes with one block, it
receives the next one from the previous rank. Outputs are combined by their log-sum-exp in float32.
Under a causal mask every step after the first is half a block, the same work on every rank (rows
are the query chunks of rank r, columns the key chunks of rank j)::

            j = r            j < r            j > r
            r   2c-1-r       j   2c-1-j       j   2c-1-j
    r       \\                x   .            .   .
    2c-1-r  x   \\            x   .            x   x

The backward passes keys and values around once more, followed by their gradients, to which every
rank adds. The last hop returns the gradients to their owners. A layer stores O(s/c) per rank.

Shapes: b samples, n heads, m key/value heads (m divides n), s tokens in the full sequence, s/c
local tokens, d channels per head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_ptdp.attention.attention_protocol import (
    AttentionCall,
    AttentionTraffic,
    DistributedAttention,
    additive,
)
from lightning_ptdp.attention.kernels import AttentionBlock, attend, attend_backward
from lightning_ptdp.attention.sequence_chunks import shard_sequence
from lightning_ptdp.base.random import derive_seed
from lightning_ptdp.world.mesh import Group

_SINGLE = 4
_STEP_OPERATIONS = 20
_HALVES = 0.75
"""Share of queries and keys that a step uses under a causal mask.

A step uses all queries and half of the keys, or half of the queries and all keys.
"""


class RingAttention(DistributedAttention):
    """Attention by a ring.

    The output of a query without visible keys is 0. The draws of dropout are seeded by one number
    of torch's CPU generator.
    """

    name = "ring"

    def __call__(self, call: AttentionCall) -> Tensor:
        """Return the local queries' results in the dtype of ``q``."""
        p = call.dropout_p
        seed = torch.randint(2**62, ()) if p else None
        mask = None if call.mask is None else call.mask[(None,) * (4 - call.mask.dim())]
        options = _Options(group=self.group, causal=call.causal, scale=call.factor, dropout_p=p)
        return _Ring.apply(call.q, call.k, call.v, mask, seed, options)

    @classmethod
    def operations(cls, size: int) -> int:
        """Return slices, the sum of the log-sum-exps, factors, products and sums of all steps."""
        return (size - 1) * _STEP_OPERATIONS

    @classmethod
    def seconds(cls, traffic: AttentionTraffic) -> tuple[float, float]:
        """Return the seconds of messages that the attention does not hide, and of merging.

        Keys and values travel in all steps except the last. Their gradients, in float32, travel
        from the third step on and once more after the last. A hop is hidden only by its own step's
        share of the attention, 1/c. Each step after the first adds its result to the sum of the
        earlier ones, in float32.
        """
        c = traffic.size
        width = traffic.width
        hides = traffic.overlaps
        hop, grad_hop = (traffic.hop(traffic.pairs * value) for value in (width, _SINGLE))
        forward = (c - 1) * max(0.0, hop - hides * traffic.forward / c)
        hops = [hop * (step < c - 1) + grad_hop * (step >= 2) for step in range(c)]
        backward = grad_hop + sum(max(0.0, value - hides * traffic.backward / c) for value in hops)
        fraction = _HALVES if traffic.causal else 1.0
        # The sum so far is scaled, the new part is scaled into its own tensor, and both are added.
        merged = (c - 1) * fraction * (6 * _SINGLE + width) + 2 * (_SINGLE + width)
        # Each part is added to the gradients so far. These start as zeros and are finally cast to
        # the precision of the computation.
        added = (c - 1) * fraction * (2 * _SINGLE + width) + 2 * (_SINGLE + width)
        forward += traffic.results * merged / traffic.memory
        return forward, backward + (traffic.queries + traffic.pairs) * added / traffic.memory


@dataclass(frozen=True, kw_only=True)
class _Options:
    group: Group
    causal: bool
    scale: float
    dropout_p: float

    @property
    def traced(self) -> tuple[bool, float, float, str]:
        """Return the options as arguments of a compiled graph's operator."""
        return self.causal, self.scale, self.dropout_p, self.group.name

    def steps(
        self, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None
    ) -> Iterator[tuple[int, slice, slice, AttentionBlock, list[Tensor]]]:
        """Yield the steps of the ring while the next keys and values are transferred.

        Yields:
            (step, rows of the queries, columns, options of their attention, these columns of the
            current keys and values).
        """
        travelling = _Travelling((k, v), self.group)
        length = k.size(2)
        rank = self.group.rank
        size = self.group.size
        run = 0 if seed is None else int(seed)
        for step in range(size):
            visiting = travelling.here()
            if step < size - 1:
                travelling.start()
            source = (rank - step) % size  # owner of the current keys and values
            rows, columns = self._seen(step, source, length)
            bias = None if mask is None else _bias(mask, rows, columns, source, size)
            step_seed = derive_seed(run, rank, source) if self.dropout_p else 0
            causal = self.causal and step == 0
            block = AttentionBlock(
                scale=self.scale, causal=causal, bias=bias, dropout_p=self.dropout_p, seed=step_seed
            )
            yield step, rows, columns, block, [x[:, :, columns] for x in visiting]
            travelling.finish()

    def _seen(self, step: int, source: int, length: int) -> tuple[slice, slice]:
        """Return the rows and the columns that attend in a step."""
        full = slice(0, length)
        chunk = length // 2
        if not self.causal or step == 0:
            return full, full
        return (full, slice(0, chunk)) if source < self.group.rank else (slice(chunk, length), full)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        seed: Tensor | None,
        options: _Options,
    ) -> Tensor:
        if torch.compiler.is_compiling():
            out, lse = torch.ops.lightning_ptdp.ring(q, k, v, mask, seed, *options.traced)
        else:
            out, lse = _attend(options, q, k, v, mask, seed)
        # The empty tensor makes the number of saved tensors differ from plain attention's: a
        # recomputation (activation checkpointing) that is not intercepted then fails in torch's own
        # check instead of giving wrong gradients.
        ctx.save_for_backward(q, k, v, out, lse, mask, seed, q.new_empty(0))
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, _ = ctx.saved_tensors
        if torch.compiler.is_compiling():
            return (
                *torch.ops.lightning_ptdp.ring_backward(grad, *saved, *ctx.options.traced),
                None,
                None,
                None,
            )
        return *_attend_backward(ctx.options, grad, *saved), None, None, None


def _attend(
    options: _Options, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp of its rows."""
    out = lse = torch.empty(0)
    with torch.autocast(q.device.type, enabled=False):
        for step, rows, _, block, (visiting_k, visiting_v) in options.steps(k, v, mask, seed):
            block_out, block_lse = attend(q[:, :, rows], visiting_k, visiting_v, block)
            if step == 0:
                out = _like(q, block_out, block_lse.dtype)
                lse = block_lse.contiguous()
            else:
                _merge(out[:, :, rows], lse[:, :, rows], block_out, block_lse)
    return out.to(q.dtype), lse


def _attend_backward(  # noqa: PLR0913
    options: _Options,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v."""
    dq = torch.empty(0)
    dkv = [torch.empty(0)]
    gradients = _Travelling(
        [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v)], options.group
    )
    with torch.autocast(q.device.type, enabled=False):
        for step, rows, columns, block, (visiting_k, visiting_v) in options.steps(k, v, mask, seed):
            grad_rows = grad[:, :, rows]
            out_rows = out[:, :, rows]
            lse_rows = lse[:, :, rows]
            dq_part, *dkv_part = attend_backward(
                grad_rows, q[:, :, rows], visiting_k, visiting_v, out_rows, lse_rows, block
            )
            if step == 0:
                dq = dq_part.to(lse.dtype)
                dkv = [x.to(lse.dtype) for x in dkv_part]
            else:
                dq[:, :, rows] += dq_part
                gradients.finish()
                for total, part in zip(gradients.here(), dkv_part, strict=True):
                    total[:, :, columns] += part
                gradients.start()  # after the keys and values to which they belong
    gradients.finish()
    for local, remote in zip(dkv, gradients.here(), strict=True):
        local += remote
    return tuple(total.to(x.dtype) for total, x in zip((dq, *dkv), (q, k, v), strict=True))


_OPTIONS = "bool causal, float scale, float dropout_p, str group"
_INPUTS = f"Tensor q, Tensor k, Tensor v, {{}}Tensor? mask, Tensor? seed, {_OPTIONS}"
torch.library.define("lightning_ptdp::ring", f"({_INPUTS.format('')}) -> (Tensor, Tensor)")
torch.library.define(
    "lightning_ptdp::ring_backward",
    f"(Tensor grad, {_INPUTS.format('Tensor out, Tensor lse, ')}) -> (Tensor, Tensor, Tensor)",
)


def _options(causal: bool, scale: float, dropout_p: float, group: str) -> _Options:
    return _Options(group=Group.named(group), causal=causal, scale=scale, dropout_p=dropout_p)


@torch.library.impl("lightning_ptdp::ring", "default")
def _traced(*inputs: Any) -> tuple[Tensor, Tensor]:
    return _attend(_options(*inputs[5:]), *inputs[:5])


@torch.library.impl("lightning_ptdp::ring_backward", "default")
def _traced_backward(*inputs: Any) -> tuple[Tensor, ...]:
    gradients = _attend_backward(_options(*inputs[8:]), *inputs[:8])
    return tuple(
        torch.empty_like(x).copy_(gradient)
        for x, gradient in zip(inputs[1:4], gradients, strict=True)
    )


@torch.library.register_fake("lightning_ptdp::ring")
def _shape(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    out = (
        torch.empty_like(q) if v.size(-1) == q.size(-1) else q.new_empty((*q.shape[:3], v.size(-1)))
    )
    return out, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.register_fake("lightning_ptdp::ring_backward")
def _shape_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Travelling:
    """Tensors that are passed around the ring, as one message per hop.

    There are two buffers: one to compute with and send, one to receive into. On CUDA the
    communication waits for the current stream's work on the buffers, and ``finish`` makes the
    stream wait for the communication.
    """

    def __init__(self, tensors: Sequence[Tensor], group: Group) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._group = group
        self._buffer = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._spare: Tensor | None = None
        self._work: list[Any] = []

    def here(self) -> list[Tensor]:
        """Return views of the current tensors."""
        parts = self._buffer.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def start(self) -> None:
        """Send the current tensors to the next rank and receive from the previous one."""
        if self._spare is None:
            self._spare = torch.empty_like(self._buffer)
        ranks = self._group.ranks
        rank = self._group.rank
        group = self._group.handle
        # Issued together: a send and a receive between the same two ranks (c = 2) must not wait for
        # each other.
        send = dist.P2POp(dist.isend, self._buffer, ranks[(rank + 1) % len(ranks)], group)
        receive = dist.P2POp(dist.irecv, self._spare, ranks[rank - 1], group)
        self._work = dist.batch_isend_irecv([send, receive])

    def finish(self) -> None:
        """Wait for a hop in progress; the received tensors become the current ones."""
        if not self._work:
            return
        for work in self._work:
            work.wait()
        self._work = []
        assert self._spare is not None
        self._buffer, self._spare = self._spare, self._buffer


def _like(q: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy ``x`` to the memory layout of the queries.

    The model's next operation (heads back to channels) then stays a view.
    """
    return torch.empty_like(q, dtype=dtype).copy_(x) if x.shape == q.shape else x.to(dtype)


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block to the accumulated rows, in place.

    Rows without visible keys have a log-sum-exp of -inf.
    """
    total = torch.logaddexp(lse, block_lse)
    reference = total.masked_fill(total == -torch.inf, 0.0)
    out.mul_((lse - reference).exp_()[..., None]).add_(
        block_out * (block_lse - reference).exp_()[..., None]
    )
    lse.copy_(total)


def _bias(mask: Tensor, rows: slice, columns: slice, source: int, size: int) -> Tensor:
    """Return the additive mask of these rows, and of these columns of ``source``'s chunks."""
    mask = mask[..., rows, :] if mask.size(-2) > 1 else mask
    bias = shard_sequence(mask, -1, rank=source, size=size)[..., columns]
    return additive(bias, torch.float64 if bias.dtype is torch.float64 else torch.float32)
