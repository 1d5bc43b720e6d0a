"""Perplexity and token accuracy."""

import math

import pytest
import torch
import torch.distributed as dist

from lightning_ptdp.metrics import Perplexity, TokenAccuracy


def test_perplexity_from_mean_losses_and_counts():
    metric = Perplexity()
    metric.update(torch.tensor(2.0), 10)
    metric.update(torch.tensor(5.0), torch.tensor(30))
    assert metric.compute().item() == pytest.approx(math.exp((2 * 10 + 5 * 30) / 40))


def test_perplexity_from_token_losses_and_mask():
    metric = Perplexity()
    metric.update(
        torch.tensor([[1.0, 3.0, torch.nan], [torch.inf, 2.0, 6.0]]),
        torch.tensor([[1, 1, 0], [0, 1, 0]]).bool(),
    )
    assert metric.compute().item() == pytest.approx(math.exp(2.0))
    metric.reset()
    metric.update(torch.tensor([1.0, 2.0]))
    assert metric.compute().item() == pytest.approx(math.exp(1.5))


def test_nan_loss_counts_only_with_tokens():
    metric = Perplexity()
    metric.update(torch.tensor(torch.nan), 0)
    assert metric.num_tokens == 0
    assert metric.nll_sum == 0
    metric.update(torch.tensor(1.0), 3)
    metric.update(torch.tensor(torch.nan), 1)
    assert metric.compute().isnan()


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_metrics_without_tokens_are_nan():
    assert Perplexity().compute().isnan()
    assert TokenAccuracy().compute().isnan()


def test_perplexity_of_diverged_model_is_finite_in_float32():
    metric = Perplexity()
    metric.update(torch.tensor([1e4, 1e30]))
    assert metric.compute().float().isfinite()


def test_perplexity_accumulates_in_float64():
    metric = Perplexity()
    metric.update(torch.tensor(1.0, dtype=torch.bfloat16), 10**9)
    for _ in range(100):
        metric.update(torch.tensor(11.0, dtype=torch.bfloat16), 1)
    assert metric.nll_sum.item() == 10**9 + 1100
    assert metric.num_tokens.item() == 10**9 + 100


def test_accuracy_from_ids_and_from_logits():
    labels = torch.tensor([[1, 2, -100], [0, -100, 2]])
    predictions = torch.tensor([[1, 1, -100], [0, 0, 0]])
    metric = TokenAccuracy()
    metric.update(predictions, labels)
    assert metric.compute().item() == 0.5
    metric.update(torch.nn.functional.one_hot(labels.clamp(min=0), 3).float(), labels)
    assert metric.compute().item() == 0.75


def test_accuracy_with_mismatched_shapes_is_refused():
    with pytest.raises(ValueError, match=r"\(2, 3\) do not match labels of shape \(3, 2\)"):
        TokenAccuracy().update(
            torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)
        )


def uneven_ranks(rank):
    perplexity, accuracy = Perplexity(), TokenAccuracy()
    if rank == 0:
        perplexity.update(torch.tensor(1.0), 1)
        accuracy.update(torch.tensor([1]), torch.tensor([1]))
    else:
        perplexity.update(torch.tensor(4.0), 5)
        accuracy.update(torch.zeros(5, dtype=torch.int64), torch.tensor([0, 1, 1, 1, 1]))
    assert dist.get_world_size() == 2
    return perplexity.compute().item(), accuracy.compute().item()


def test_metrics_weight_ranks_by_tokens(pool):
    for perplexity, accuracy in pool.run(uneven_ranks, world_size=2):
        assert perplexity == pytest.approx(math.exp(21 / 6))
        assert accuracy == pytest.approx(2 / 6)
