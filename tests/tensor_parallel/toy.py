"""Helpers of the tensor parallel tests: a tensor group, comparisons and a transformer."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.parameters.placement import Placement, slice_full
from lightning_ptdp.tensor_parallel import Column, ParallelPlan, shard_module
from lightning_ptdp.tensor_parallel.kinds import ModulePlace
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import Group, ProcessMesh

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2}


def tensor_group(rank: int) -> Group:
    """Return the tensor group of a worker, which is the whole world."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    layout = ParallelLayout(world_size=size, tensor_parallel_size=size)
    return ProcessMesh.create(layout=layout, rank=rank).group("tensor")


def assert_same(got: Tensor, expected: Tensor, *, dtype: torch.dtype | None = None) -> None:
    """Assert equality up to the summation order of the dtype."""
    limit = TOLERANCE.get(dtype or expected.dtype, 0.0)
    torch.testing.assert_close(
        got, expected, rtol=limit, atol=limit, equal_nan=True, check_dtype=dtype is None
    )


def with_z_loss(logits: Tensor, target: Tensor, z_loss: float, **options: Any) -> Tensor:
    """Return torch's loss plus the z-loss by its definition."""
    expected = F.cross_entropy(
        logits.movedim(-1, 1) if logits.dim() > 1 else logits, target, **options
    )
    counted = target != options.get("ignore_index", -100)
    extra = (z_loss * logits.logsumexp(-1).square()).masked_fill(~counted, 0.0)
    match options.get("reduction", "mean"):
        case "mean":
            return expected + extra.sum() / counted.sum()
        case "sum":
            return expected + extra.sum()
        case _:
            return expected + extra


def own_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's part of a dimension."""
    return x.chunk(group.size, dim)[group.rank]


def everything(x: Tensor) -> Tensor:
    """Return what is not cut."""
    return x


def sequence_slice(group: Group, sequence_parallel: bool) -> Callable[[Tensor], Tensor]:
    """Return the function that cuts this rank's slice of the sequence, if it is split."""
    return partial(own_slice, group=group, dim=1) if sequence_parallel else everything


def shard(
    module: nn.Module,
    kind: Any,
    group: Group,
    *,
    sequence_parallel: bool = False,
    shared: dict[int, nn.Parameter] | None = None,
) -> tuple[Any, dict[str, Placement]]:
    """Return the parallel form of a module that is not in a plan, and its placements."""
    place = ModulePlace(
        group=group,
        sequence_parallel=sequence_parallel,
        shared={} if shared is None else shared,
    )
    return shard_module(module, kind, place)


def compare_passes(
    layer: Callable[[Tensor], Tensor],
    reference: nn.Module,
    x: Tensor,
    grad: Tensor,
    *,
    own_input: Callable[[Tensor], Tensor],
    own_output: Callable[[Tensor], Tensor],
) -> tuple[Counter[str], Counter[str]]:
    """Compare the output and the input's gradient with those of the whole layer.

    Args:
        layer: Parallel form of ``reference``.
        reference: Layer in a single process; its parameters get gradients.
        x: Whole input.
        grad: Gradient of the whole output.
        own_input: Function that cuts this rank's part of the input.
        own_output: Function that cuts this rank's part of the output.

    Returns:
        The collectives of the parallel forward and backward.
    """
    differentiable = x.is_floating_point()
    full_x = x.clone().requires_grad_(differentiable)
    expected = reference(full_x)
    expected.backward(grad)
    own_x = own_input(x).clone().requires_grad_(differentiable)
    with counted_collectives() as forward:
        y = layer(own_x)
    with counted_collectives() as backward:
        y.backward(own_output(grad))
    assert_same(y, own_output(expected))
    if differentiable:
        assert_same(own_x.grad, own_input(full_x.grad))
    return forward, backward


def whole_gradient(grad: Tensor, sharding: Placement, group: Group) -> Tensor:
    """Return the full gradient from the partial ones of the ranks.

    Partial gradients are summed over the group. So are the parts of copied rows.
    """
    if sharding.partial:
        grad = grad.clone()
        dist.all_reduce(grad, group=group.handle)
    if sharding.has_copies:
        everyones = [torch.empty_like(grad) for _ in range(group.size)]
        dist.all_gather(everyones, grad.contiguous(), group=group.handle)
        grad = grad.clone()
        for piece in sharding.pieces:
            first = group.rank - piece.copy
            grad[piece.in_local.slices] = sum(
                other[piece.in_local.slices] for other in everyones[first : first + piece.copies]
            )
    return grad


def assert_gradients(
    module: nn.Module,
    shardings: dict[str, Placement],
    reference: nn.Module,
    group: Group,
    dtype: torch.dtype | None = None,
) -> None:
    """Assert that every local gradient is its part of the reference's."""
    expected = dict(reference.named_parameters())
    assert list(shardings) == [name for name, _ in module.named_parameters()] == list(expected)
    for name, parameter in module.named_parameters():
        sharding, full = shardings[name], expected[name].grad
        assert parameter.grad is not None, name
        assert full is not None, name
        assert tuple(parameter.shape) == sharding.local_shape, name
        assert_same(
            whole_gradient(parameter.grad, sharding, group), slice_full(full, sharding), dtype=dtype
        )


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Count the calls of collectives in torch.distributed, by kind."""
    counts: Counter[str] = Counter()
    names = {
        "all_reduce": "all_reduce",
        "all_gather_single": "all_gather",
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_single": "reduce_scatter",
        "reduce_scatter_tensor": "reduce_scatter",
    }
    patches = []
    for name, kind in names.items():
        function = getattr(dist, name, None)
        if function is not None:

            def counting(
                *args: Any, function: Any = function, kind: str = kind, **kwargs: Any
            ) -> Any:
                counts[kind] += 1
                return function(*args, **kwargs)

            patches.append(patch.object(dist, name, counting))
    for patched in patches:
        patched.start()
    try:
        yield counts
    finally:
        for patched in patches:
            patched.stop()


class Attention(nn.Module):
    """Grouped-query attention that reads heads and length from its tensors."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.queries = heads // kv_heads
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.head_dim)
        self.proj = nn.Linear(hidden, hidden)
        self.q_norm = nn.LayerNorm(self.head_dim)

    def forward(self, x):
        qkv = self.qkv(x)
        width = qkv.size(-1) // (self.queries + 2)
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in qkv.split((width * self.queries, width, width), dim=-1)
        )
        y = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, kv_heads)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Toy(nn.Module):
    """A transformer: token ids (b, s) -> logits (b, s, V)."""

    def __init__(
        self,
        *,
        vocabulary: int = 37,
        hidden: int = 32,
        heads: int = 8,
        kv_heads: int = 4,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, hidden), nn.Embedding(16, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, kv_heads) for _ in range(2))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1)))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def toy_plan() -> ParallelPlan:
    """Return the plan of ``Toy()``."""
    return ParallelPlan(
        blocks="layers",
        tensor={
            "wte": "vocabulary",
            "wpe": "position",
            "layers.*.attention.qkv": Column(parts=(32, 16, 16)),
            "layers.*.attention.q_norm": "partial",
            "layers.*.attention.proj": "row",
            "layers.*.up": "column",
            "layers.*.down": "row",
            "head": "vocabulary",
        },
        before=("wte", "wpe"),
        after=("norm", "head"),
    )


def assemble_full(parts: Sequence[Tensor], shardings: Sequence[Placement]) -> Tensor:
    """Assemble the full tensor from the local tensors of all ranks: the inverse of
    ``slice_full``."""
    full = torch.empty(shardings[0].full_shape, dtype=parts[0].dtype, device=parts[0].device)
    for local, sharding in zip(parts, shardings, strict=True):
        for piece in sharding.pieces:
            full[piece.in_full.slices] = local.detach()[piece.in_local.slices]
    return full
