"""Helpers of the context parallel tests.

They provide a context group, comparisons, attention over the whole sequence as a reference, and
counts of messages."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.attention import shard_sequence
from lightning_ptdp.context_parallel import ContextParallel
from lightning_ptdp.context_parallel.context import ContextForward
from lightning_ptdp.forward.surroundings import Forward
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import Group, ProcessMesh

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def context_group(rank: int) -> Group:
    """Return the context group of a worker, which is the whole world."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    layout = ParallelLayout(world_size=size, context_parallel_size=size)
    return ProcessMesh.create(layout=layout, rank=rank).group("context")


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Assert equality up to the summation order of the dtype."""
    limit = TOLERANCE[dtype or expected.dtype]
    torch.testing.assert_close(got, expected, rtol=limit, atol=limit)


def own(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's part of a dimension."""
    return shard_sequence(x, dim, rank=group.rank, size=group.size)


def qkv(
    *,
    heads: int,
    kv_heads: int,
    length: int,
    dtype: torch.dtype,
    samples: int = 2,
    channels: int = 8,
    seed: int = 0,
) -> list[Tensor]:
    """Return random q, k, v and an output gradient, equal on all ranks. In memory heads follow the
    sequence, as in models."""
    generator = torch.Generator().manual_seed(seed)
    counts = (heads, kv_heads, kv_heads, heads)
    shapes = [(samples, length, count, channels) for count in counts]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)
        for shape in shapes
    ]


def whole_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Return torch's attention over the whole sequence."""
    if mask is not None and causal:
        past = torch.ones(q.size(2), q.size(2), dtype=torch.bool).tril()
        mask, causal = (
            (mask & past if mask.dtype is torch.bool else mask.masked_fill(~past, -torch.inf)),
            False,
        )
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.size(1) != k.size(1), **options
    )


def gradients(output: Tensor, grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the inputs."""
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


@contextmanager
def counted_messages() -> Iterator[Counter[str]]:
    """Count messages and bytes of ring sends and of all-to-alls, which send nothing to the own
    rank."""
    counts: Counter[str] = Counter()
    batch_isend_irecv, all_to_all_single = dist.batch_isend_irecv, dist.all_to_all_single

    def ring(operations: list[Any]) -> Any:
        for operation in operations:
            if operation.op is dist.isend:
                counts["messages"] += 1
                counts["bytes"] += operation.tensor.numel() * operation.tensor.element_size()
        return batch_isend_irecv(operations)

    def all_to_all(
        output: Tensor, source: Tensor, *args: Any, group: Any = None, **kwargs: Any
    ) -> Any:
        sent = args[1]
        assert sent[dist.get_rank(group)] == 0
        counts["messages"] += 1
        counts["bytes"] += source.numel() * source.element_size()
        return all_to_all_single(output, source, *args, group=group, **kwargs)

    with (
        patch.object(dist, "batch_isend_irecv", ring),
        patch.object(dist, "all_to_all_single", all_to_all),
    ):
        yield counts


def weighted(running: ContextForward, loss: Tensor) -> Tensor:
    """Return the loss times its ``share``, or 0 on a rank without labels, where the mean is 0/0.
    Collective."""
    share = running.share(loss)
    return torch.where(share > 0, loss, torch.zeros_like(loss)) * share


@contextmanager
def sliced(
    parallel: ContextParallel, model: nn.Module, batch: Any, *, expects_attention: bool = True
) -> Iterator[ContextForward]:
    """Run a step of ``model`` on this rank's slice of a batch inside the context."""
    if parallel._module is not model:
        parallel.attach(model)
    parallel.attending = (0,) if expects_attention else ()
    forward = Forward(hook="training_step", full_batch=batch)
    with parallel.around(forward):
        assert isinstance(forward.part, ContextForward)
        yield forward.part
