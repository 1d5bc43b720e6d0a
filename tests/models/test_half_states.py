"""AdamW with bfloat16 states."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_ptdp.models import AdamWConfig
from lightning_ptdp.models.adamw_variants import HalfStateAdamW, round_stochastically
from tests.letters import M, P, T, Z
from tests.tiny_gpt import Run


@pytest.mark.parametrize("value", [1.0 + 2**-9, -3.0e-5, 0.1, 1e30])
def test_rounding_keeps_mean_over_seeds(value):
    values = torch.full((64,), value)
    values *= 1 + torch.linspace(0, 2**-12, 64)  # other bits, and so other noise
    rounded = torch.stack([round_stochastically(values, seed) for seed in range(1000)]).double()
    spacing = 2.0 ** (math.floor(math.log2(abs(value))) - 7)
    assert (rounded - values).abs().max() < spacing  # a neighbour
    # The standard deviation of one rounding is at most half of the spacing.
    mean_of_all = (rounded - values).mean().abs()
    assert mean_of_all < 5 * spacing / 2 / math.sqrt(rounded.numel())
    assert ((rounded - values).mean(0).abs() < 5 * spacing / 2 / math.sqrt(1000)).all()


def test_exact_and_nonfinite_values_are_kept():
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan])
    for seed in range(50):
        torch.testing.assert_close(
            round_stochastically(values, seed), values.bfloat16(), rtol=0, atol=0, equal_nan=True
        )


def test_equal_values_round_alike_in_every_shard():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = round_stochastically(values, 3)
    parts = [round_stochastically(part, 3) for part in values.split(137)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, round_stochastically(values, 4))


def _train(build, steps, **options):
    draw = torch.Generator().manual_seed(1)
    inputs, target = torch.randn(256, 32, generator=draw), torch.randn(32, 1, generator=draw)
    weight = nn.Parameter(torch.zeros(32, 1))
    optimizer = build([weight], lr=0.01, betas=(0.9, 0.999), weight_decay=0.01, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        (inputs @ weight - inputs @ target).square().mean().backward()
        optimizer.step()
    return (weight.detach() - target).norm() / target.norm(), optimizer


def test_first_step_equals_adamw():
    ours, _ = _train(HalfStateAdamW, 1)
    torchs, _ = _train(torch.optim.AdamW, 1)
    torch.testing.assert_close(ours, torchs)


def test_training_converges_like_float32_states():
    ours, optimizer = _train(HalfStateAdamW, 600)
    torchs, _ = _train(torch.optim.AdamW, 600)
    assert ours < max(2 * torchs, 0.02)
    (state,) = optimizer.state.values()
    assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}


def test_states_resume_bitwise():
    _, first = _train(HalfStateAdamW, 5)
    (weight,) = first.param_groups[0]["params"]
    twin = nn.Parameter(weight.detach().clone())
    second = HalfStateAdamW([twin], lr=0.01, betas=(0.9, 0.999), weight_decay=0.01)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for parameter, optimizer in ((weight, first), (twin, second)):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert torch.equal(weight, twin)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(first.state[weight][name], second.state[twin][name])


def test_muon_with_half_states_is_refused():
    with pytest.raises(
        ValueError, match=r"states='bfloat16' applies to AdamW, but matrices='muon'"
    ):
        AdamWConfig(states="bfloat16", matrices="muon")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "precision"),
    [({}, "32-true"), ({}, "bf16-true"), ({T: 2}, "bf16-true"), ({P: 2, M: 1}, "32-true")],
    ids=str,
)
def test_shards_of_states_change_nothing(layout, precision, parity):
    """With the same sums of two terms, the weights are bitwise those of whole states."""
    run = Run(half_states=True, clip=None, precision=precision, layers=2, steps=2)
    world_size = 2 * layout.get(T, 1) * layout.get(P, 1)
    whole, *others = (
        parity.result(run.on((world_size, {**layout, Z: level})))["final"]
        for level in ("none", "optimizer", "gradients", "parameters")
    )
    for sharded in others:
        for name, value in whole.items():
            assert torch.equal(sharded[name], value), name


def test_half_states_resume_bitwise_in_other_level(parity, tmp_path):
    run, saved = (
        Run(half_states=True, clip=None, samples=8, global_batch=8),
        str(tmp_path / "saved"),
    )
    straight = parity.result(run.on((2, {Z: "optimizer"})))["final"]
    parity.ranks(replace(run, steps=2, save=saved).on((2, {Z: "optimizer"})))
    resumed = parity.result(replace(run, resume=saved).on((2, {Z: "parameters"})))["final"]
    for name, value in straight.items():
        assert torch.equal(resumed[name], value), name
