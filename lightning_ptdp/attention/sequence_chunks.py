"""Division of a sequence over the c ranks of a context group.

The sequence is cut into 2c chunks, and rank r takes chunks r and 2c-1-r (zigzag; arXiv 2407.21783,
section 3.3.2). Under a causal mask a late token attends to more tokens than an early one. With one
chunk from each end all ranks do equal work::

    c = 4      chunk     0   1   2   3   4   5   6   7
               rank      0   1   2   3   3   2   1   0

Both kinds of attention use this layout, so that the data do not depend on the kind. A rank's tokens
stay in ascending order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ptdp.shims.torch_distributed import all_gather_single
from lightning_ptdp.world.axes import nearest_multiples
from lightning_ptdp.world.mesh import Group


def check_sequence(
    length: int, context_parallel_size: int, *, sequence_parallel_size: int = 1
) -> None:
    """Check that a sequence can be cut.

    Args:
        length: s, tokens of the full sequence.
        context_parallel_size: c.
        sequence_parallel_size: t if activations between tensor-parallel regions are split along the
            sequence, else 1.

    Raises:
        ValueError: The length is not a multiple of 2c (and c * t); the message names the nearest
            lengths that work.
    """
    if context_parallel_size == 1:
        return
    unit = math.lcm(2 * context_parallel_size, context_parallel_size * sequence_parallel_size)
    if length % unit:
        tensor = (
            f" and sequence parallelism over {sequence_parallel_size} ranks"
            if unit != 2 * context_parallel_size
            else ""
        )
        raise ValueError(
            f"a sequence of {length} tokens cannot be split for "
            f"context_parallel_size={context_parallel_size}{tensor}. Every rank takes two "
            f"equal chunks, so the length must be a multiple of {unit}. Pad or truncate it to "
            f"{nearest_multiples(length, unit)} tokens"
        )


def positions(
    length: int, rank: int, size: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Return a rank's token positions in the full sequence, (s/c) int64, ascending.

    Args:
        length: s, tokens of the full sequence.
        rank: Rank in the context group.
        size: c.
        device: Device of the result.

    Raises:
        ValueError: As in ``check_sequence``.
    """
    return shard_sequence(torch.arange(length, device=device), 0, rank=rank, size=size)


def shard_sequence(x: Tensor, dim: int, *, rank: int, size: int) -> Tensor:
    """Return a rank's part of ``x`` (..., s, ...) along ``dim``: (..., s/c, ...).

    The result is a differentiable copy, or ``x`` itself if c = 1.

    Raises:
        ValueError: As in ``check_sequence``.
    """
    check_sequence(x.size(dim), size)
    if size == 1:
        return x
    chunk = x.size(dim) // (2 * size)
    return torch.cat(
        (x.narrow(dim, rank * chunk, chunk), x.narrow(dim, (2 * size - 1 - rank) * chunk, chunk)),
        dim,
    )


def unshard_sequence(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Join the parts of all ranks, in order: the inverse of ``shard_sequence``."""
    if len(parts) == 1:
        return parts[0]
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim)


def gather_sequence(x: Tensor, dim: int, *, group: Group) -> Tensor:
    """Gather the full sequence from all ranks' parts, on every rank.

    Collective, without gradient.
    """
    if group.size == 1:
        return x
    x = x.detach().contiguous()
    parts = x.new_empty((group.size * x.numel(),))
    all_gather_single(parts, x.flatten(), group.handle)
    return unshard_sequence([part.view(x.shape) for part in parts.chunk(group.size)], dim)
