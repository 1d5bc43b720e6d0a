"""Memory-efficient attention on GPUs: torch's signatures, and the arithmetic around its operators.

Without a GPU, stand-ins with the operators' contract compute in their place. They refuse arguments
that the kernels would refuse or read out of bounds.
"""

import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed.tensor  # assert_close imports it, which needs the real operators
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_ptdp.attention import kernels
from lightning_ptdp.attention.kernels import (
    AttentionBlock,
    attend,
    attend_backward,
    fused_kernel,
)
from lightning_ptdp.attention.ring import _merge
from tests.context_parallel.toy import assert_close, qkv
from tests.pool import in_new_process

SCALE = 1 / math.sqrt(8)
FORWARD = "_scaled_dot_product_efficient_attention"
BACKWARD = "_scaled_dot_product_efficient_attention_backward"
SIGNATURES = {
    FORWARD: "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
    BACKWARD: "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset "
    "dropout_p grad_input_mask is_causal scale",
    "_scaled_dot_product_flash_attention": "query key value dropout_p is_causal "
    "return_debug_mask scale",
    "_scaled_dot_product_flash_attention_backward": "grad_out query key value out logsumexp "
    "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed philox_offset scale",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_private_operators_have_expected_arguments(name):
    schema = getattr(torch.ops.aten, name).default._schema
    assert " ".join(argument.name for argument in schema.arguments) == SIGNATURES[name]


def scores_of(q, k, bias, causal, scale):
    """Return the scores in float32, after checking the arguments as the kernel does."""
    assert q.dtype == k.dtype
    assert q.size(1) == k.size(1), "the kernel has no grouped heads"
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if bias is not None:
        assert bias.dtype == q.dtype
        assert bias.shape == scores.shape
        assert bias.stride(-1) == 1
        assert all(stride % 8 == 0 for stride in bias.stride()[:-1])
        scores = scores + bias.float()
        assert (scores * math.log2(math.e)).isfinite().all(), "the kernel computes powers of 2"
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores


def forward(q, k, v, bias, needs_lse, dropout_p=0.0, causal=False, *, scale):
    """Stand-in of the forward, whose log-sum-exp is padded to 32 rows with inf."""
    assert needs_lse
    scores = scores_of(q, k, bias, causal, scale)
    lse = scores.logsumexp(-1)
    padded = torch.nn.functional.pad(lse, (0, -q.size(2) % 32), value=torch.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype), padded, torch.empty(()), torch.empty(())


def backward(
    grad, q, k, v, bias, out, lse, seed, offset, dropout_p, wanted, causal=False, *, scale
):
    """Stand-in of the backward."""
    assert (wanted, dropout_p) == ([True, True, True, False], 0.0)
    assert grad.dtype == out.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert lse.size(2) == math.ceil(q.size(2) / 32) * 32
    assert (lse[..., q.size(2) :] == torch.inf).all(), "rows beyond the end need a weight of 0"
    weights = (scores_of(q, k, bias, causal, scale) - lse[..., : q.size(2), None]).exp()
    delta = (grad.float() * out.float()).sum(-1, keepdim=True)
    grad_scores = weights * (grad.float() @ v.float().transpose(-1, -2) - delta) * scale
    grads = (
        grad_scores @ k.float(),
        grad_scores.transpose(-1, -2) @ q.float(),
        weights.transpose(-1, -2) @ grad.float(),
    )
    return (*(x.to(q.dtype) for x in grads), None)


@pytest.fixture
def stand_in():
    """Choose the kernel on a CPU, in place of the CPU's own, for all but float64."""
    choose = fused_kernel

    def chosen(q, *rest):
        return "efficient" if choose(q, *rest) == "cpu" else None

    with (
        patch.object(kernels, "fused_kernel", chosen),
        patch.object(torch.ops.aten, FORWARD, forward),
        patch.object(torch.ops.aten, BACKWARD, backward),
    ):
        yield


def biases(queries, keys):
    """Return biases of every form that broadcasts, with hidden keys and blind rows."""
    numbers = torch.randn(2, 4, queries, keys, generator=torch.Generator().manual_seed(3))
    hidden = numbers.masked_fill(torch.arange(keys) > 2 * keys // 3, -torch.inf)
    blind = hidden.clone()
    blind[0, :, 3] = -torch.inf
    blind[1, 1] = -torch.inf
    return {
        "keys": hidden[:, :1, :1],
        "keys of one sample": hidden[:1, :1, :1],
        "heads": hidden[:1, :, :1],
        "queries": hidden[:1, :1],
        "rows without keys": blind,
        "sample without keys": blind[:, 1:2],
    }


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [*biases(4, 4), None])
def test_efficient_kernel_matches_plain_kernel(name, causal, kv_heads, dtype):
    """13 queries are no multiple of 32, and 13 or 11 keys no multiple of 8."""
    q, k, v, grad = qkv(heads=4, kv_heads=kv_heads, length=13, dtype=dtype)
    if not causal:
        k, v = k[:, :, :11], v[:, :, :11]
    bias = None if name is None else biases(13, k.size(2))[name].to(dtype).float()
    block = AttentionBlock(scale=SCALE, causal=causal, bias=bias)
    exact = AttentionBlock(scale=SCALE, causal=causal, bias=None if bias is None else bias.double())
    out, lse = attend(q, k, v, block)
    found = (out, lse, *attend_backward(grad, q, k, v, out, lse, block))
    wide = [x.double() for x in (q, k, v, grad)]
    exact_out, exact_lse = attend(*wide[:3], exact)
    expected = attend_backward(wide[3], *wide[:3], exact_out, exact_lse, exact)
    tolerance = torch.float32 if dtype is torch.float32 else torch.bfloat16
    for mine, whole in zip(found, (exact_out, exact_lse, *expected), strict=True):
        assert_close(mine.double(), whole, tolerance)


@pytest.mark.usefixtures("stand_in")
def test_efficient_blocks_combine_to_full_attention():
    """A row may see no key in one block only, or in both."""
    q, k, v, grad = qkv(heads=4, kv_heads=2, length=13, dtype=torch.float32)
    bias = torch.zeros(2, 1, 13, 13)
    bias[0, 0, 3, :6] = -torch.inf
    bias[1, 0, 7] = -torch.inf
    halves = [slice(0, 6), slice(6, 13)]
    blocks = [AttentionBlock(scale=SCALE, bias=bias[..., half]) for half in halves]
    parts = [
        attend(q, k[:, :, half], v[:, :, half], block)
        for half, block in zip(halves, blocks, strict=True)
    ]
    (out, lse), other = parts
    lse = lse.contiguous()
    _merge(out, lse, *other)
    wide = [x.double() for x in (q, k, v, grad)]
    exact = AttentionBlock(scale=SCALE, bias=bias.double())
    exact_out, exact_lse = attend(*wide[:3], exact)
    assert_close(out.double(), exact_out, torch.float32)
    assert_close(lse.double(), exact_lse, torch.float32)
    dq, dk, dv = attend_backward(wide[3], *wide[:3], exact_out, exact_lse, exact)
    total = torch.zeros_like(q)
    for half, block in zip(halves, blocks, strict=True):
        shares = attend_backward(grad, q, k[:, :, half], v[:, :, half], out, lse, block)
        total += shares[0]
        assert_close(shares[1].double(), dk[:, :, half], torch.float32)
        assert_close(shares[2].double(), dv[:, :, half], torch.float32)
    assert_close(total.double(), dq, torch.float32)


GPU_BLOCKS = [
    (torch.bfloat16, False, False, "flash"),
    (torch.bfloat16, True, False, "efficient"),
    (torch.float16, True, True, "efficient"),
    (torch.float32, False, True, "efficient"),
    (torch.float32, True, False, "efficient"),
]


def _run_on_gpu_without_data():
    for dtype, bias, causal, kernel in GPU_BLOCKS:
        q = torch.empty(2, 4, 13, 8, device="cuda", dtype=dtype)
        k = torch.empty(2, 2, 13, 8, device="cuda", dtype=dtype)
        hidden = torch.empty(2, 1, 1, 13, device="cuda") if bias else None
        block = AttentionBlock(scale=SCALE, causal=causal, bias=hidden)
        assert fused_kernel(q, k, k, block) == kernel
        out, lse = attend(q, k, k, block)
        grads = attend_backward(out, q, k, k, out, lse, block)
        assert (out.shape, out.dtype) == (q.shape, dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]
    q = torch.empty(2, 4, 13, 8, device="cuda")
    odd = torch.empty(2, 4, 13, 6, device="cuda")
    double = q.double()
    assert fused_kernel(q, q, q, AttentionBlock(scale=SCALE, dropout_p=0.1)) is None
    assert fused_kernel(odd, odd, odd, AttentionBlock(scale=SCALE)) is None
    assert fused_kernel(double, double, double, AttentionBlock(scale=SCALE)) is None


def _fake_gpu():
    cuda = torch.backends.cuda
    with (
        FakeTensorMode(),
        patch.object(cuda, "can_use_flash_attention", return_value=True),
        patch.object(cuda, "can_use_efficient_attention", return_value=True),
    ):
        _run_on_gpu_without_data()


def test_blocks_on_gpu_use_fused_kernels():
    """The operators of the installed torch accept the calls, with tensors of a GPU without data.

    In a process of its own, because torch refuses a backward in a process that is forked from one
    with such tensors.
    """
    assert in_new_process(_fake_gpu) == 0
