"""Products in pieces of the sequence, overlapped with the collectives of other pieces."""

from dataclasses import dataclass, field
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ptdp.forward.deferred_weight_gradients import WeightGradients
from lightning_ptdp.shims.torch_distributed import has_symmetric_products
from lightning_ptdp.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.queued import HOST
from tests.tensor_parallel.toy import tensor_group

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
WIDTH, LENGTH = 6, 5
"""LENGTH is the length of a rank's slice of the sequence."""


@dataclass
class Beside(TorchDispatchMode):
    """Collectives in flight while a product is computed.

    Attributes:
        since: Index of the first call of the host that counts.
        beside: Indices of these collectives.
    """

    since: int = field(default_factory=lambda: len(HOST.calls))
    beside: set[int] = field(default_factory=set)

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in PRODUCTS:
            calls = range(self.since, len(HOST.calls))
            waited = {HOST.calls[place].waits for place in calls}
            self.beside |= {
                place for place in calls if HOST.calls[place].what.startswith("_")
            } - waited
        return function(*args, **kwargs or {})

    @property
    def share(self):
        """Share of collectives that overlapped with products, by number of elements."""
        given = {
            p: call.parts[0][0]
            for p, call in enumerate(HOST.calls)
            if p >= self.since and call.what.startswith("_")
        }
        return Fraction(sum(given[place] for place in self.beside), sum(given.values()) or 1)


def _whole_numbers(*shape, seed):
    """Return integers, whose products and sums are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def _pair(group, pieces, *, samples, bias, frozen, defers, transposed):
    """Return outputs and gradients of a column and a row layer, and the share of communication that
    overlapped with products, in forward and backward."""

    def parameter(*shape, seed):
        values = _whole_numbers(*shape, seed=seed)
        return nn.Parameter(
            values.t().contiguous() if transposed and len(shape) > 1 else values,
            requires_grad=not frozen,
        )

    options = {"transposed": transposed, "group": group, "sequence_parallel": True}
    up, down = parameter(4, WIDTH, seed=group.rank), parameter(WIDTH, 4, seed=9 + group.rank)
    first, last = (
        parameter(n, seed=n + seed) if bias else None for n, seed in ((4, group.rank), (WIDTH, 0))
    )
    found, shares = [], []
    for layer, shape in (
        (ColumnParallelLinear(up, first, **options), (samples, LENGTH, WIDTH)),
        (RowParallelLinear(down, last, **options), (samples, LENGTH * group.size, 4)),
    ):
        layer.pieces, store = pieces, WeightGradients()
        layer.weight_gradients = store if defers else None
        x = _whole_numbers(*shape, seed=20 + group.rank).requires_grad_()
        with Beside() as forward:
            y = layer(x)
        shares.append(forward.share)
        with Beside() as backward, store.collecting(0):
            y.backward(_whole_numbers(*y.shape, seed=30 + group.rank))
        shares.append(backward.share)
        store.run(0)
        found += [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
    return found, shares


CASES = (
    {"samples": 2, "bias": True, "frozen": False, "defers": False, "transposed": False},
    {"samples": 1, "bias": False, "frozen": False, "defers": True, "transposed": False},
    {"samples": 2, "bias": True, "frozen": False, "defers": True, "transposed": True},
    {"samples": 1, "bias": True, "frozen": True, "defers": False, "transposed": False},
)


def check(rank):
    group = tensor_group(rank)
    for options in CASES:
        expected, before = _pair(group, 1, **options)
        # The backward pass of the column layer overlaps its reduction with the product of the
        # weight gradient, unless that is deferred or skipped.
        other = 0 if options["frozen"] or options["defers"] else 1
        assert before == [0, other, 0, 0], options
        for pieces in (LENGTH, 3):
            found, beside = _pair(group, pieces, **options)
            for value, got in zip(expected, found, strict=True):
                torch.testing.assert_close(
                    got,
                    value,
                    rtol=0,
                    atol=0,
                    msg=lambda m, o=options, p=pieces: f"{o}, {p} pieces: {m}",
                )
            if pieces == LENGTH:
                all_but_one = Fraction(LENGTH - 1, LENGTH)
                assert beside == [all_but_one, other or all_but_one, all_but_one, all_but_one], (
                    options
                )


@pytest.mark.parametrize("size", [2, 4])
def test_overlapped_products_are_bitwise_equal(size, pool):
    pool.run(check, world_size=size, backend="queued")


def check_symmetric(rank):
    """Compare products by symmetric memory. torch's fallbacks for meta tensors replace the kernels
    of GPUs."""
    from torch.distributed import _symmetric_memory as symmetric

    assert has_symmetric_products()
    library, group = torch.library.Library("symm_mem", "IMPL"), tensor_group(rank)
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl(
        "fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU"
    )
    for options in CASES:
        expected, found = (_pair(group, pieces, **options)[0] for pieces in (1, "symmetric"))
        torch.testing.assert_close(
            found, expected, rtol=0, atol=0, msg=lambda m, o=options: f"{o}: {m}"
        )
        assert found[0].is_contiguous()
    library._destroy()


def test_symmetric_memory_products_are_bitwise_equal(pool):
    pool.run(check_symmetric, world_size=2)
