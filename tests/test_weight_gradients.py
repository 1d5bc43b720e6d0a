"""Split backward passes, whose gradients equal those of a single backward."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ptdp.blocks.recompute import apply_recomputation
from lightning_ptdp.forward.deferred_weight_gradients import WeightGradients
from lightning_ptdp.forward.surroundings import Forward, Surroundings
from lightning_ptdp.models import GPT, GPTConfig
from lightning_ptdp.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh


class Products(nn.Module):
    """Module with all kinds of products, one shared parameter and one unsupported product."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.bare = nn.Linear(6, 6, bias=False)
        self.matrix = nn.Parameter(torch.randn(6, 6))
        self.conv = nn.Parameter(torch.randn(6, 6))
        self.offset = nn.Parameter(torch.randn(6))
        self.odd = nn.Parameter(torch.randn(6, 6))
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        x = self.norm(torch.tanh(self.linear(x)))
        x = torch.tanh(self.bare(self.bare(x)))
        x = torch.tanh(x @ self.matrix + torch.matmul(x, self.matrix))
        x = torch.tanh(torch.addmm(self.offset, x.view(-1, 6), self.conv).view_as(x))
        return torch.einsum("bsi,io->bso", self.frozen(x), self.odd)


def _whole(module, x):
    x = x.clone().requires_grad_()
    module.zero_grad()
    module(x).square().sum().backward()
    return x.grad, {
        name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
    }


def _halves(module, x, between=lambda _: None):
    store = WeightGradients()
    x = x.clone().requires_grad_()
    module.zero_grad()
    with store.intercepting():
        loss = module(x).square().sum()
    with store.collecting("key"):
        torch.autograd.backward(loss)
    del loss
    between(store)
    store.run("key")
    return x.grad, {
        name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
    }


def _assert_same(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(
            found[1][name],
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def test_split_backward_of_every_product_kind():
    torch.manual_seed(0)
    module = Products().double()
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    waiting = []

    def between(store):
        waiting.extend(store.parameters("key"))
        late = {"linear.weight", "linear.bias", "bare.weight", "matrix", "conv", "offset"}
        assert {
            name for name, p in module.named_parameters() if any(p is w for w in waiting)
        } == late
        assert all(p.grad is None for p in waiting)
        assert module.norm.weight.grad is not None
        assert module.odd.grad is not None

    _assert_same(_halves(module, x, between), _whole(module, x))


def test_microbatches_accumulate_and_report_complete_parameters():
    torch.manual_seed(0)
    module = Products().double()
    store, done = WeightGradients(), []
    inputs = torch.randn(3, 2, 4, 6, dtype=torch.float64)
    for key, x in enumerate(inputs):
        with store.intercepting():
            loss = module(x).sum()
        with store.collecting(key):
            torch.autograd.backward(loss)
    for key in range(3):
        store.run(key, done.append if key == 2 else None)
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    for x in inputs:
        module(x).sum().backward()
    for name, value in found.items():
        torch.testing.assert_close(value, module.get_parameter(name).grad, rtol=1e-12, atol=1e-12)
    assert len({id(p) for p in done}) == len(done) == 6


def test_intercepted_products_without_collecting_are_unchanged():
    torch.manual_seed(0)
    module = Products().double()
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    with WeightGradients().intercepting():
        module(x).square().sum().backward()
    found = (
        x.grad,
        {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None},
    )
    _assert_same(found, _whole(module, x.detach()))


def test_parameter_with_hook_is_not_deferred():
    module = nn.Linear(4, 4)
    seen = []
    module.weight.register_hook(seen.append)
    store = WeightGradients()
    with store.intercepting():
        loss = module(torch.randn(2, 4)).sum()
    with store.collecting(0):
        torch.autograd.backward(loss)
    assert len(seen) == 1
    assert store.parameters(0) == []


@pytest.mark.parametrize("recompute", ["none", "ours", "somebody's", "offload"])
def test_split_backward_of_gpt_with_autocast_and_recomputation(recompute):
    torch.manual_seed(0)
    sizes = {
        "vocabulary_size": 31,
        "sequence_length": 8,
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 2,
    }
    model = GPT(GPTConfig.gpt2(**sizes))
    ids = torch.randint(0, 31, (2, 8))
    store = WeightGradients()
    surroundings = Surroundings([store])
    options = {"context_fn": surroundings.recomputation} if recompute == "ours" else {}

    def loss():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = (
                model(ids)
                if recompute in ("none", "offload")
                else checkpoint(model, ids, use_reentrant=False, **options)
            )
            return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())

    loss().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    if recompute == "offload":
        apply_recomputation(model, policy="offload", blocks="blocks", surroundings=surroundings)
    with surroundings.around(Forward(hook="training_step", splits_backward=True)):
        value = loss()
    with store.collecting(0):
        torch.autograd.backward(value)
    # Weights and biases of four products per block, and the head.
    assert len(store.parameters(0)) == (0 if recompute == "somebody's" else 2 * 8 + 1)
    store.run(0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            expected[name],
            rtol=2e-2,
            atol=2e-3,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def test_graph_is_freed_between_backward_halves():
    """Only the operands of the products are kept.

    The output of the exponential, which only the first half needs, is freed.
    """

    class Exponential(nn.Module):
        def forward(self, x):
            y = torch.exp(x)
            outputs.append(weakref.ref(y))
            return y * 1.0

    outputs = []
    module = nn.Sequential(nn.Linear(8, 8), Exponential(), nn.Linear(8, 8))
    store = WeightGradients()
    with store.intercepting():
        loss = module(torch.randn(4, 8)).sum()
    with store.collecting(0):
        torch.autograd.backward(loss)
    assert len(store.parameters(0)) == 4
    assert outputs[0]() is None
    store.run(0)
    assert store.parameters(0) == []


def _pair(rank, sequence_parallel, split):
    mesh = ProcessMesh.create(
        layout=ParallelLayout(
            world_size=2, tensor_parallel_size=2, sequence_parallel=sequence_parallel
        ),
        rank=rank,
    )
    group = mesh.group("tensor")
    generator = torch.Generator().manual_seed(rank)

    def parameter(*shape):
        return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

    column = ColumnParallelLinear(
        parameter(6, 4), parameter(6), group=group, sequence_parallel=sequence_parallel
    )
    row = RowParallelLinear(
        parameter(4, 6), parameter(4), group=group, sequence_parallel=sequence_parallel
    )
    shared = torch.Generator().manual_seed(5 + rank * sequence_parallel)
    x = torch.randn(2, 4, 4, generator=shared, dtype=torch.float64, requires_grad=True)
    store = WeightGradients()
    column.weight_gradients = row.weight_gradients = store if split else None
    loss = row(torch.tanh(column(x))).square().sum()
    if split:
        with store.collecting(0):
            torch.autograd.backward(loss)
        assert column.weight.grad is None
        assert row.weight.grad is None
        store.run(0)
    else:
        torch.autograd.backward(loss)
    names = {
        "column.weight": column.weight,
        "column.bias": column.bias,
        "row.weight": row.weight,
        "row.bias": row.bias,
        "x": x,
    }
    return {name: value.grad for name, value in names.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_split_backward_of_tensor_parallel_layers(sequence_parallel, pool):
    whole = pool.run(_pair, world_size=2, args=(sequence_parallel, False))
    halves = pool.run(_pair, world_size=2, args=(sequence_parallel, True))
    for expected, found in zip(whole, halves, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
