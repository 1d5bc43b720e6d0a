"""Shims over names of torch that differ between the supported versions, in one place (tests/test_torch_shims.py)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["all_gather_single", "reduce_scatter_single"]


def all_gather_single(output: torch.Tensor, source: torch.Tensor, group: Any, *, async_op: bool = False) -> Any:
    """Gather ``source`` of every rank, concatenated along dimension 0, into ``output`` (torch renamed it in 2.13)."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(output, source, group=group, async_op=async_op)


def reduce_scatter_single(
    output: torch.Tensor,
    source: torch.Tensor,
    group: Any,
    *,
    op: Any = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> Any:
    """Reduce ``source`` over the ranks and keep this rank's slice along dimension 0 (torch renamed it in 2.13)."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return function(output, source, op=op, group=group, async_op=async_op)
