"""Compiled loss formulas against eager ones, and the conditions for compilation."""

from unittest import mock

import pytest
import torch

from lightning_ptdp.forward import fused as fused_functions
from lightning_ptdp.forward.fused import fused
from lightning_ptdp.tensor_parallel.cross_entropy import TokenLoss
from lightning_ptdp.tensor_parallel.tensor_shards import VocabularyRange
from tests.tensor_parallel.toy import assert_same

_N, _K = 5, 7


def _double(x):
    return 2 * x


def _inputs(dtype):
    """Return logits, columns (some of other ranks), log Z of a larger vocabulary, gradients."""
    generator = torch.Generator().manual_seed(1)
    logits_nk = torch.randn(_N, _K, generator=generator, dtype=torch.float64).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    log_sum_n = logits_nk.to(wide).logsumexp(-1) + 0.5
    grad_n = torch.rand(_N, generator=generator, dtype=torch.float64).to(wide)
    return logits_nk, torch.tensor([0, -9, _K - 1, _K, 3]), log_sum_n, grad_n


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 1e-2)])
def test_compiled_loss_formulas_match_eager(smoothing, z_loss, dtype):
    formula = TokenLoss(VocabularyRange(size=20), smoothing, z_loss)
    logits_nk, column_n, log_sum_n, grad_n = _inputs(dtype)
    for function, arguments in (
        (TokenLoss.summary, (log_sum_n, grad_n, 2 * grad_n)),
        (TokenLoss.sums, (log_sum_n,)),
        (TokenLoss.gradient, (log_sum_n, grad_n)),
    ):
        compiled = torch.compile(function, backend="aot_eager", dynamic=False)
        for found, expected in zip(
            *(
                torch.atleast_1d(each(formula, logits_nk.clone(), column_n, *arguments))
                for each in (compiled, function)
            ),
            strict=True,
        ):
            assert_same(found, expected)


def test_gradient_overwrites_logits_in_place():
    formula, (logits_nk, column_n, *rest) = (
        TokenLoss(VocabularyRange(size=20), 0.0, 0.0),
        _inputs(torch.float64),
    )
    expected = formula.gradient(logits_nk.clone(), column_n, *rest)
    found = formula.gradient(logits_nk, column_n, *rest, out=logits_nk)
    assert found.data_ptr() == logits_nk.data_ptr()
    assert_same(found, expected)


def test_functions_are_compiled_only_on_gpu_with_compiler():
    gpu = torch.device("cuda")
    assert fused(_double, torch.device("cpu")) is _double
    with mock.patch.object(fused_functions, "missing_compiler", return_value="a C compiler"):
        assert fused(_double, gpu) is _double
    fused_functions._compiled.cache_clear()
    with mock.patch.object(fused_functions, "missing_compiler", return_value=""):
        assert fused(_double, gpu) is not _double
        assert fused(_double, gpu) is fused(_double, gpu), "compiled twice"
    fused_functions._compiled.cache_clear()
