"""Ring and all-to-all attention match unsharded attention in output and all gradients."""

import pytest
import torch

from lightning_ptdp.attention import ATTENTIONS, ContextParallelError
from lightning_ptdp.attention.attention_protocol import AttentionCall
from tests.context_parallel.toy import (
    assert_close,
    context_group,
    gradients,
    own,
    qkv,
    whole_attention,
)

pytestmark = pytest.mark.thorough

LENGTH = 24

CASES = {
    "plain": {},
    "grouped": {"heads": 4, "kv_heads": 2},
    "one kv head": {"heads": 4, "kv_heads": 1},
    "three kv heads": {"heads": 12, "kv_heads": 3},
    "padded": {"mask": "padding"},
    "padded, grouped, scaled": {"mask": "padding", "kv_heads": 2, "scale": 0.7},
    "additive mask with rows": {"mask": "additive"},
    "boolean mask of each head": {"mask": "heads"},
    "a query that sees nothing": {"mask": "blind"},
}


def make_mask(name, heads, dtype):
    """Return a mask of the whole sequence that broadcasts to (2, heads, s, s)."""
    generator = torch.Generator().manual_seed(1)
    if name is None:
        return None
    if name == "padding":
        return (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 9]]))[:, None, None]
    if name == "additive":
        return torch.randn(2, 1, LENGTH, LENGTH, generator=generator, dtype=torch.float64).to(dtype)
    seen = torch.rand(2, heads, LENGTH, LENGTH, generator=generator) < 0.6
    if name == "blind":
        seen[0, 1, 5] = seen[1, :, -1] = False
        return seen
    return seen | torch.eye(LENGTH, dtype=torch.bool)


def _compare(rank, kind, case, causal, dtype, group):
    options = {"scale": case["scale"]} if "scale" in case else {}
    heads = case.get("heads", 4)
    q, k, v, grad = qkv(
        heads=heads, kv_heads=case.get("kv_heads", heads), length=LENGTH, dtype=dtype
    )
    mask = make_mask(case.get("mask"), heads, dtype)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected = gradients(
        whole_attention(q, k, v, causal=causal, mask=mask, **options), grad, *inputs
    )
    local = [own(x.detach(), 2, group).requires_grad_() for x in inputs]
    if mask is not None and mask.size(2) > 1:
        mask = own(mask, 2, group)
    output = ATTENTIONS[kind](group)(AttentionCall(*local, causal=causal, mask=mask, **options))
    assert output.dtype == dtype
    got = gradients(output, own(grad, 2, group), *local)
    for mine, whole in zip(got, expected, strict=True):
        assert_close(mine, own(whole, 2, group))


def _all_cases(rank, kind, dtype):
    group = context_group(rank)
    for name, case in CASES.items():
        for causal in (True, False):
            try:
                _compare(rank, kind, case, causal, dtype, group)
            except AssertionError as error:
                raise AssertionError(f"{name}, causal={causal}: {error}") from error


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_context_parallel_attention_matches_unsharded(pool, kind, size, dtype):
    pool.run(_all_cases, world_size=size, args=(kind, dtype))


def _bfloat16(rank):
    group = context_group(rank)
    q, k, v, grad = qkv(heads=2, kv_heads=2, length=LENGTH, dtype=torch.bfloat16)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = gradients(whole_attention(*exact, causal=True), grad.double(), *exact)
    local = [own(x.detach(), 2, group).requires_grad_() for x in inputs]
    got = gradients(
        ATTENTIONS["ring"](group)(AttentionCall(*local, causal=True)), own(grad, 2, group), *local
    )
    for mine, whole in zip(got, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        assert_close(mine.double(), own(whole, 2, group), torch.bfloat16)


def test_bfloat16_ring_matches_float64_reference(pool):
    pool.run(_bfloat16, world_size=4)


def _value_width(rank):
    group = context_group(rank)
    q, k, v, grad = qkv(heads=2, kv_heads=2, length=LENGTH, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v[..., :5].detach())]
    expected = gradients(whole_attention(*inputs, causal=True), grad[..., :5], *inputs)
    for attention in ATTENTIONS.values():
        local = [own(x.detach(), 2, group).requires_grad_() for x in inputs]
        got = gradients(
            attention(group)(AttentionCall(*local, causal=True)),
            own(grad[..., :5], 2, group),
            *local,
        )
        for mine, whole in zip(got, expected, strict=True):
            assert_close(mine, own(whole, 2, group))


def test_values_narrower_than_keys(pool):
    pool.run(_value_width, world_size=2)


def _dropout(rank):
    """Return derivatives from autograd and finite differences, and sums of kept weights."""
    group = context_group(rank)
    q, k, v, grad = (
        own(x, 2, group)
        for x in qkv(heads=2, kv_heads=1, length=8, dtype=torch.float64, samples=1, channels=3)
    )

    def loss(*inputs):
        torch.manual_seed(7)
        return (
            ATTENTIONS["ring"](group)(AttentionCall(*inputs, causal=True, dropout_p=0.4)) * grad
        ).sum()

    inputs = [x.requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(loss(*inputs), inputs)
    directions = [torch.randn_like(x) for x in inputs]
    step = 1e-6
    with torch.no_grad():
        high = loss(*(x + step * d for x, d in zip(inputs, directions, strict=True)))
        low = loss(*(x - step * d for x, d in zip(inputs, directions, strict=True)))
        ones = torch.ones_like(v)
        torch.manual_seed(7)
        kept = ATTENTIONS["ring"](group)(
            AttentionCall(torch.zeros_like(q), k, ones, causal=False, dropout_p=0.4)
        )
    along = sum((g * d).sum() for g, d in zip(found, directions, strict=True))
    return torch.stack((torch.as_tensor(along), (high - low) / (2 * step))), kept


def test_ring_dropout_gradient_matches_finite_differences(pool):
    results = pool.run(_dropout, world_size=2)
    along, numeric = sum(result[0] for result in results)
    assert along.item() == pytest.approx(numeric.item(), rel=1e-6)
    kept = torch.cat([result[1] for result in results], 2)[..., 0]
    assert 0.5 < kept.mean() < 1.5  # sums of 8 weights of 1/8, some dropped
    assert len(kept.flatten().round(decimals=6).unique()) > 2
    assert not torch.equal(results[0][1], results[1][1]), "ranks with equal seeds drew equal masks"


def _too_few_heads(rank):
    group = context_group(rank)
    q, k, v, _ = (own(x, 2, group) for x in qkv(heads=3, kv_heads=3, length=8, dtype=torch.float32))
    with pytest.raises(ContextParallelError) as error:
        ATTENTIONS["all_to_all"](group)(AttentionCall(q, k, v, causal=True))
    return str(error.value)


def test_all_to_all_with_indivisible_heads_is_refused(pool):
    (message, _) = pool.run(_too_few_heads, world_size=2)
    assert "the 3 heads of" in message
    assert "Use a context_parallel_size of 1, 3" in message
