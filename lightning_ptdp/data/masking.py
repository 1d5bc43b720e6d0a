"""Whole-word masking: choice of the tokens to predict, and their replacements."""

from __future__ import annotations

import numpy as np

from lightning_ptdp.data.sample_draws import Draws
from lightning_ptdp.data.word_boundaries import WordVocabulary

__all__ = ["choose_words", "number_to_predict", "replace_tokens"]

_MASKED, _RANDOM = 0.8, 0.1
"""Shares of the chosen tokens that become [MASK] and a random token.

The rest is unchanged (arXiv 1810.04805, section 3.1).
"""


def number_to_predict(tokens: int, probability: float) -> int:
    """Return the largest number of predicted tokens among ``tokens``."""
    return max(1, round(probability * tokens))


def choose_words(starts: np.ndarray, sizes: np.ndarray, *, budget: int, draws: Draws) -> np.ndarray:
    """Return positions of the tokens of random whole words, int64, ascending.

    At most ``budget`` tokens are chosen. Words are taken in random order; a word that is longer
    than the remaining budget is skipped. Nothing is chosen if every word is longer than the budget.

    Args:
        starts: Position of the first token of each word.
        sizes: Number of tokens of each word.
        budget: Number of tokens to choose.
        draws: Random numbers of the sample.
    """
    chosen = []
    for word in draws.shuffled(len(sizes)):
        if sizes[word] <= budget:
            chosen.append(np.arange(starts[word], starts[word] + sizes[word]))
            budget -= int(sizes[word])
            if not budget:
                break
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)


def replace_tokens(tokens: np.ndarray, *, draws: Draws, vocabulary: WordVocabulary) -> np.ndarray:
    """Return the replacements of the chosen tokens.

    A replacement is [MASK], a random ordinary token, or the token itself.
    """
    kind = draws.uniform(len(tokens))
    random = vocabulary.ordinary[draws.below(len(vocabulary.ordinary), len(tokens))]
    return np.where(
        kind < _MASKED, vocabulary.mask, np.where(kind < _MASKED + _RANDOM, random, tokens)
    )
