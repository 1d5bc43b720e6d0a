"""Text generation on one device, one token at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["generate"]


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    sequence_length: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue each sequence by ``max_new_tokens`` sampled tokens.

    The whole context is computed again for every token; the cost grows with its square.

    Args:
        model: Token ids (b, s) -> logits (b, s, V); its training mode is put back afterwards.
        input_ids: Prompts of equal length (b, s) int64, s >= 1.
        max_new_tokens: Number of tokens to add.
        sequence_length: Longest context that the model takes, older tokens are dropped; None: ``model.config.sequence_length``.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Sample among the k most likely tokens only; None: among all.
        generator: Source of the draws, on the device of ``input_ids``; None: torch's own.

    Returns:
        Prompts and new tokens (b, s + max_new_tokens) int64.

    Raises:
        ValueError: An empty prompt, a negative temperature or number of tokens, or top_k below 1.
    """
    _check(input_ids, max_new_tokens, temperature, top_k)
    if sequence_length is None:
        config: Any = model.config
        sequence_length = int(config.sequence_length)
    training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            logits_bv = model(input_ids[:, -sequence_length:])[:, -1].float()
            input_ids = torch.cat((input_ids, _choose(logits_bv, temperature, top_k, generator)), dim=1)
    finally:
        model.train(training)
    return input_ids


def _choose(logits_bv: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits_bv.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits_bv.size(-1):
        smallest_kept = logits_bv.topk(top_k).values[:, -1:]
        logits_bv = logits_bv.masked_fill(logits_bv < smallest_kept, -torch.inf)
    return torch.multinomial((logits_bv / temperature).softmax(-1), 1, generator=generator)


def _check(input_ids: Tensor, max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if input_ids.dim() != 2 or input_ids.size(1) == 0:
        raise ValueError(
            f"input_ids of shape {tuple(input_ids.shape)} must be (batch, tokens) with at least one token: begin the prompt "
            "with the tokenizer's start token"
        )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must not be negative")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must not be negative; 0 takes the most likely token")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1, or None for all tokens")
