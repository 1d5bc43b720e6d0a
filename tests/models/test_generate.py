"""Sampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ptdp.models import GPT, generate
from tests.models.configs import GPT2, LLAMA


class Counting(nn.Module):
    """Token n is followed by n + 1 with logit 3, n + 2 with 2, n + 3 with 1; 0 for all others."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    def forward(self, ids: Tensor) -> Tensor:
        assert not self.training
        self.longest = max(self.longest, ids.size(1))
        logits = torch.zeros(*ids.shape, 10)
        for step, value in ((1, 3.0), (2, 2.0), (3, 1.0)):
            logits.scatter_(-1, ((ids + step) % 10)[..., None], value)
        return logits


def sample(prompt: Tensor, count: int, *, seed: int = 0, model: nn.Module | None = None, **kwargs: Any) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return generate(model or Counting(), prompt, count, sequence_length=8, generator=generator, **kwargs)


def test_greedy_and_cropped_to_the_sequence_length() -> None:
    model = Counting()
    continued = sample(torch.tensor([[3], [8]]), 12, temperature=0.0, model=model)
    assert continued[0].tolist() == [n % 10 for n in range(3, 16)]
    assert continued[1].tolist() == [n % 10 for n in range(8, 21)]
    assert model.longest == 8
    assert model.training


def test_the_seed_decides() -> None:
    model = GPT(GPT2)
    prompt = torch.tensor([[1, 2, 3]])
    draws = [generate(model, prompt, 30, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert draws[0].shape == (1, 33)
    assert torch.equal(draws[0][:, :3], prompt)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_top_k_and_temperature() -> None:
    prompt = torch.zeros(2000, 1, dtype=torch.int64)
    assert set(sample(prompt, 1, top_k=2)[:, 1].tolist()) == {1, 2}
    assert len(set(sample(prompt, 1, top_k=99)[:, 1].tolist())) == 10
    share = [(sample(prompt, 1, temperature=t, top_k=2)[:, 1] == 1).double().mean().item() for t in (0.5, 1.0, 2.0)]
    expected = [1 / (1 + torch.e ** (-1 / t)) for t in (0.5, 1.0, 2.0)]
    assert share == pytest.approx(expected, abs=0.04)


def test_nothing_to_add() -> None:
    prompt = torch.tensor([[1, 2]])
    assert torch.equal(generate(GPT(LLAMA), prompt, 0), prompt)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, "at least one token"),
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, r"shape \(3,\)"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"top_k": 0}, "top_k=0"),
    ],
)
def test_mistakes(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generate(**({"model": Counting(), "input_ids": torch.zeros(1, 1, dtype=torch.int64), "max_new_tokens": 1} | arguments))
