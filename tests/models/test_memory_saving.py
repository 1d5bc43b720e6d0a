"""Memory-saving operations with the same values and gradients as torch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_ptdp.models.memory_saving import RMSNorm, Rotary, rotary_tables, swiglu


def _gradients(function, x, parameters):
    x = x.clone().requires_grad_()
    y = function(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return [y, *torch.autograd.grad((y * weights).sum(), [x, *parameters])]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_equals_torch(dtype):
    torch.manual_seed(0)
    ours, theirs = (make(12, eps=1e-3).to(dtype) for make in (RMSNorm, nn.RMSNorm))
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.copy_(torch.randn(12)))
    x = torch.randn(2, 3, 12, dtype=dtype)
    for found, value in zip(
        _gradients(ours, x, [ours.weight]), _gradients(theirs, x, [theirs.weight]), strict=True
    ):
        assert found.dtype is dtype
        torch.testing.assert_close(
            found, value, **({"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {})
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_swiglu_equals_torch(dtype):
    def plain(x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    x = torch.randn(2, 3, 8, dtype=dtype)
    for found, value in zip(_gradients(swiglu, x, []), _gradients(plain, x, []), strict=True):
        torch.testing.assert_close(found, value)


@pytest.mark.parametrize("given", [False, True])
def test_rotary_embedding_equals_complex_product(given):
    rotary, x = Rotary(6, 100.0), torch.randn(2, 5, 4, 6, dtype=torch.float64)
    positions = torch.tensor([[3, 0, 1, 7, 2], [1, 2, 3, 4, 5]]) if given else None

    def plain(x):
        cos, sin = (
            table.unsqueeze(-2).double()
            for table in rotary_tables(
                torch.arange(5) if positions is None else positions, rotary.head_dim, rotary.base
            )
        )
        pairs = torch.view_as_complex(torch.stack(x.chunk(2, dim=-1), dim=-1)) * torch.complex(
            cos, sin
        )
        rotated = torch.cat((pairs.real, pairs.imag), dim=-1)
        return torch.cat((rotated[:, :, :3], x[:, :, 3:]), dim=2)

    for found, value in zip(
        _gradients(lambda x: rotary(x, positions, turned=3), x, []),
        _gradients(plain, x, []),
        strict=True,
    ):
        torch.testing.assert_close(found, value)
