"""Weight gradients of products, added in place to existing gradients.

This happens only where nothing observes the separate gradient.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ptdp.data_parallel.bucket import GradientState
from lightning_ptdp.data_parallel.buckets import GradientBuckets
from lightning_ptdp.data_parallel.reduction import Reduction
from lightning_ptdp.forward.deferred_weight_gradients import WeightGradients
from lightning_ptdp.forward.matrix_product import MatrixProduct
from lightning_ptdp.shims.torch import set_gradient_dtype
from tests.data_parallel.managed import managed


class _Traffic(TorchDispatchMode):
    """Dispatch mode that counts the bytes read and written of matrices of one shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.bytes = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Needed until torch 2.13: the meta kernel of this operation fails. It returns `out`.
        result = kwargs["out"] if func is torch.ops.aten.addmm.dtype_out else func(*args, **kwargs)
        for tensor in () if func.is_view else (*args, result):
            if isinstance(tensor, Tensor) and tensor.shape == self.shape:
                self.bytes += tensor.numel() * tensor.element_size()
        return result


def _microbatch(module, x, *, splits):
    store = WeightGradients()
    with store.intercepting():
        loss = module(x).sum()
    if not splits:
        torch.autograd.backward(loss)
        return
    with store.collecting(0):
        torch.autograd.backward(loss)
    store.run(0)


def test_gradient_of_slice_is_left_to_autograd(recwarn):
    """A slice of a parameter, such as one of three projections, has no ``grad``."""
    weight = nn.Parameter(torch.ones(6, 2))
    weight.grad = torch.zeros(6, 2)
    product = MatrixProduct(weight[:3])
    assert torch.equal(
        product.give_weight_gradient(torch.ones(4, 3), torch.ones(4, 2)), 4 * weight[:3]
    )
    assert not recwarn.list


def test_bf16_product_is_added_to_float32_gradient_in_one_pass():
    with torch.device("meta"):
        weight, x, grad = (
            torch.empty(size, dtype=torch.bfloat16) for size in ((10, 6), (3, 4, 6), (3, 4, 10))
        )
        weight = nn.Parameter(weight)
        set_gradient_dtype(weight, torch.float32)
        weight.grad = torch.empty(weight.shape)
    with _Traffic(weight.shape) as traffic:
        MatrixProduct(weight).add_weight_gradient(grad, x)
    # 18 with a bfloat16 product, a cast and a sum
    assert traffic.bytes / weight.numel() == 4 + 4


@pytest.mark.parametrize("splits", [False, True])
def test_backward_adds_product_to_gradient_in_one_pass(splits):
    module, x = nn.Linear(6, 10, bias=False), torch.ones(3, 4, 6)
    module.weight.grad = torch.zeros_like(module.weight)
    with _Traffic(module.weight.shape) as traffic:
        _microbatch(module, x, splits=splits)
    assert traffic.bytes / module.weight.numel() == 4 + 4  # 16 with a separate product and a sum
    assert module.weight.grad.eq(12).all()


def test_products_and_lookups_of_shared_weight_match_autograd():
    torch.manual_seed(0)
    weight, ids = nn.Parameter(torch.randn(5, 4, dtype=torch.float64)), torch.tensor([[1, 4, 1]])

    def backward():
        x = nn.functional.embedding(ids, weight)
        torch.autograd.backward(
            nn.functional.linear(x.tanh() @ weight.t() @ weight, weight).square().sum()
        )

    for _ in range(2):
        backward()
    expected, weight.grad = weight.grad, torch.zeros_like(weight)
    for _ in range(2):
        with WeightGradients().intercepting():
            backward()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=1e-12)


def _by_hook(weight, loss):
    seen = []
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    torch.autograd.backward(loss)
    return seen[0]


def _by_late_hook(weight, loss):
    before, seen = weight.grad.clone(), []
    weight.register_post_accumulate_grad_hook(
        lambda parameter: seen.append(parameter.grad - before)
    )
    torch.autograd.backward(loss)
    return seen[0]


@pytest.mark.parametrize(
    "ask", [_by_hook, _by_late_hook, lambda weight, loss: torch.autograd.grad(loss, [weight])[0]]
)
def test_hooks_and_autograd_grad_receive_gradient(ask):
    module, x = nn.Linear(4, 3, bias=False), torch.ones(2, 4)
    module.weight.grad = torch.ones(3, 4)
    with WeightGradients().intercepting():
        loss = module(x).sum()
    torch.testing.assert_close(ask(module.weight, loss), torch.full((3, 4), 2.0))


def test_gradients_outside_backward_inputs_are_unchanged():
    module, x = nn.Linear(4, 3, bias=False), torch.ones(2, 4, requires_grad=True)
    module.weight.grad = torch.ones(3, 4)
    with WeightGradients().intercepting():
        loss = module(x).sum()
    torch.autograd.backward(loss, inputs=[x])
    assert x.grad is not None
    assert module.weight.grad.eq(1).all()


def test_bucket_is_reduced_after_in_place_product():
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    buckets = GradientBuckets(managed(module.parameters()), {(): Reduction()}, bucket_bytes=1)
    buckets.begin(keep=False)
    buckets.expect(0)
    with WeightGradients().intercepting():
        loss = module(torch.ones(2, 4)).sum()
    torch.autograd.backward(loss)
    assert [bucket.state for bucket in buckets.buckets()] == [GradientState.REDUCING] * 2
    assert buckets.unused() == []
    assert all(view.any() for bucket in buckets.buckets() for view in bucket.views)
    buckets.close()
