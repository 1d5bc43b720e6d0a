"""Dispatch of tokens to the ranks of their experts, and back.

Each way is one all-to-all of uneven sizes; the backward runs from bottom to top::

    forward                        backward
    all-to-all of counts
    all-to-all of rows             all-to-all of gradients
    experts
    all-to-all of their outputs    all-to-all of gradients
    weighted sum of k

The host must know the number of rows per rank and expert before it can request them. This costs one
device synchronization per layer, which a recomputation does not repeat (``HostNumbers``). The
faults of a router are read in the same synchronization. One rank alone (e = 1) needs no number; on
a GPU, the device itself then checks for faults.

A choice beyond an expert's capacity is not sent. One rank alone computes its row as zeros instead,
because the number of kept rows is known only to the device.

Reordered rows are always gathered, in the backward too; no scatter with addition is used.

Shapes: n local tokens, k experts per token, h features; E experts, e ranks; r received rows, each
for one of the E/e local experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.shims.torch import assert_on_device
from lightning_ptdp.world.mesh import Group


class ExpertError(PTDPError, ValueError):
    """A router chose an expert that does not exist, or a weight that is not finite."""


@dataclass
class HostNumbers:
    """Numbers that the host reads from the device.

    Attributes:
        kept: List to which every reading is added; None: readings are not kept.
        known: Readings of the same forward, which are returned in place of new ones; None: numbers
            are read.
    """

    kept: list[list[int]] | None = None
    known: list[list[int]] | None = None

    def read(self, numbers: Tensor) -> list[int]:
        """Return the values of an integer tensor."""
        if self.known is not None:
            return self.known.pop(0)
        values: list[int] = numbers.tolist()
        if self.kept is not None:
            self.kept.append(values)
        return values


@dataclass(frozen=True, kw_only=True)
class _Order:
    """A permutation of rows, and its inverse."""

    order: Tensor
    places: Tensor

    @property
    def undone(self) -> _Order:
        return _Order(order=self.places, places=self.order)


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """Rows received for the experts of this rank, and the way back.

    Attributes:
        rows_rh: (r, h), sorted by expert, and for each expert in the order of the sending ranks.
        counts: (E/e,) int64, number of rows of each local expert.
    """

    rows_rh: Tensor
    counts: Tensor
    going: _Order
    group: Group
    arrived: _Order | None = None
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    known_sizes: list[int] | None = None

    def sizes(self) -> list[int]:
        """Return ``counts`` on the host. If e = 1, this waits for the device."""
        return self.counts.tolist() if self.known_sizes is None else self.known_sizes

    @property
    def experts_r(self) -> Tensor:
        """Return the local expert of each row, (r,) int64."""
        experts = torch.arange(self.counts.numel(), device=self.counts.device)
        return experts.repeat_interleave(self.counts, output_size=self.rows_rh.size(0))

    def combine(self, outputs_rh: Tensor, weights_nk: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs for each local token, (n, h)."""
        back = _exchange(
            _reordered(outputs_rh, self.arrived and self.arrived.undone),
            self.received,
            self.sent,
            self.group,
        )
        if dropped := self.going.order.numel() - back.size(0):
            back = F.pad(back, (0, 0, 0, dropped))
        return _Combine.apply(back, weights_nk, self.going)


def dispatch(
    x_nh: Tensor,
    index_nk: Tensor,
    weights_nk: Tensor,
    *,
    num_experts: int,
    group: Group,
    router: Callable[[], str],
    numbers: HostNumbers | None = None,
    kept_nk: Tensor | None = None,
) -> Dispatched:
    """Send each token to the ranks of its experts; collective, forward and backward.

    Args:
        x_nh: Tokens.
        index_nk: int64, the experts of each token, 0 to E - 1.
        weights_nk: Weights of these experts.
        num_experts: E, a multiple of the group's size; the group's i-th rank holds the i-th part of
            them.
        group: e ranks.
        router: Returns the description of the router for errors. A compiler would specialize a graph
            for each text.
        numbers: Reads the sizes.
        kept_nk: bool, the choices within the capacities; None: all. The experts must return zeros
            for a row of zeros.

    Raises:
        ExpertError: A choice of this rank does not exist, or a weight is not finite.
    """
    chosen = index_nk.reshape(-1)
    exists = (chosen >= 0) & (chosen < num_experts)
    chosen = torch.where(exists, chosen, num_experts - 1)
    if kept_nk is not None and group.size > 1:
        chosen = torch.where(kept_nk.reshape(-1), chosen, num_experts)  # sorted to the end
    order = chosen.argsort(stable=True)
    going = _Order(
        order=order,
        places=torch.empty_like(order).scatter_(0, order, _numbers(order.numel(), order)),
    )
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=x_nh.device)
    counts = counts.scatter_add_(0, chosen, torch.ones_like(chosen))[:-1]
    rows = _Take.apply(x_nh, going, index_nk.size(1))
    wrong = torch.stack([(~exists).sum(), (~weights_nk.isfinite()).sum()])
    if group.size == 1:
        if kept_nk is not None:
            rows = torch.where(kept_nk.reshape(-1, 1).index_select(0, order), rows, 0)
        if wrong.device.type == "cpu":
            nowhere, not_finite = wrong.tolist()
            _check(nowhere, not_finite, num_experts, router)
        else:
            assert_on_device(
                wrong.sum() == 0,
                "a router chose an expert that does not exist, or a weight that is not finite",
            )
        return Dispatched(rows_rh=rows, counts=counts, going=going, group=group)
    received_counts = torch.empty_like(counts)
    dist.all_to_all_single(received_counts, counts, group=group.handle)
    read = (numbers or HostNumbers()).read
    *both, nowhere, not_finite = read(torch.cat([counts, received_counts, wrong]))
    num_local = num_experts // group.size
    halves = both[:num_experts], both[num_experts:]
    sent, received = (
        [sum(half[start : start + num_local]) for start in range(0, num_experts, num_local)]
        for half in halves
    )
    if kept_nk is not None:
        rows = rows[: sum(sent)]
    rows = _exchange(rows, sent, received, group)
    received_counts = received_counts.view(group.size, num_local)
    arrived = _by_expert(received_counts, sum(received)) if num_local > 1 else None
    _check(nowhere, not_finite, num_experts, router)
    return Dispatched(
        rows_rh=_reordered(rows, arrived),
        counts=received_counts.sum(0),
        known_sizes=[sum(halves[1][expert::num_local]) for expert in range(num_local)],
        going=going,
        arrived=arrived,
        sent=sent,
        received=received,
        group=group,
    )


def _check(nowhere: int, not_finite: int, num_experts: int, router: Callable[[], str]) -> None:
    """Refuse a number of choices of missing experts, and of weights that are not finite."""
    if nowhere:
        raise ExpertError(
            f"the router of {router()} chose experts that do not exist {nowhere} times (valid: 0 to "
            f"{num_experts - 1})"
        )
    if not_finite:
        raise ExpertError(
            f"the router of {router()} returned {not_finite} weights that are not finite"
        )


def _numbers(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


def _by_expert(counts: Tensor, rows: int) -> _Order:
    """Return the order that sorts received rows by expert.

    The rows are received in the order of the ranks, sorted by expert for each rank. ``counts`` (e,
    E/e) add up to ``rows``.
    """
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    by_expert = counts.t().reshape(-1)
    new = (by_expert.cumsum(0) - by_expert).view(counts.size(1), counts.size(0))
    index = _numbers(rows, counts)
    return _Order(
        order=index + (starts.t() - new).flatten().repeat_interleave(by_expert, output_size=rows),
        places=index
        + (new.t() - starts).flatten().repeat_interleave(counts.flatten(), output_size=rows),
    )


def _reordered(x: Tensor, order: _Order | None) -> Tensor:
    return x if order is None else _Take.apply(x, order, 1)


class _Take(torch.autograd.Function):
    """Rows in another order, each repeated ``times`` times.

    The gradient of a row is gathered from the positions of its copies.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: _Order, times: int) -> Tensor:
        ctx.save_for_backward(order.places)
        ctx.times = times
        return x.index_select(0, order.order if times == 1 else order.order // times)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        grad_rows = grad.index_select(0, places)
        return (
            grad_rows if ctx.times == 1 else grad_rows.view(-1, ctx.times, grad.size(1)).sum(1),
            None,
            None,
        )


class _Combine(torch.autograd.Function):
    """The weighted sum of each token's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights_nk: Tensor, order: _Order) -> Tensor:
        ctx.save_for_backward(rows, weights_nk, order.order, order.places)
        rows_nkh = rows.index_select(0, order.places).view(*weights_nk.shape, rows.size(1))
        if rows_nkh.dtype == weights_nk.dtype:
            return torch.bmm(weights_nk.unsqueeze(1), rows_nkh).squeeze(1)
        return (rows_nkh * weights_nk.unsqueeze(-1)).sum(1).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights_nk, order, places = ctx.saved_tensors
        grad_rows = grad.index_select(0, order // weights_nk.size(1))
        grad_rows = grad_rows.to(torch.promote_types(rows.dtype, weights_nk.dtype))
        grad_weights = (
            (grad_rows * rows)
            .sum(1)
            .index_select(0, places)
            .view_as(weights_nk)
            .to(weights_nk.dtype)
        )
        weights = weights_nk.reshape(-1, 1).index_select(0, order)
        return grad_rows.mul_(weights).to(rows.dtype), grad_weights, None


class _TokenExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        ctx.sizes = (received, sent)
        ctx.group = group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.sizes
        return _all_to_all(grad, sent, received, ctx.group), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Send consecutive rows of ``x`` to each rank, and return the rows received.

    The received rows are in the order of the ranks.
    """
    return x if group.size == 1 else _TokenExchange.apply(x, sent, received, group)


def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    result = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=group.handle)
    return result
