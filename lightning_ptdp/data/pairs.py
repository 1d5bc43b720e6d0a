"""Windows of a token store and pairs of segments from them; a window never spans two documents.

A document longer than a window is cut into windows of equal length::

    store     d0 d0 d0 d0 d0 END d1 d1 END d2 d2 d2 ...       room for 3 tokens
    windows   [d0 d0] [d0 d0 d0]  [d1 d1]   [d2 d2 d2]

The places of all windows are found once, by looking for the end tokens; a window takes 20 bytes of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_ptdp.data.draws import Draws
from lightning_ptdp.data.words import Vocabulary

__all__ = ["LEAST_TOKENS", "PairObjective", "Windows", "draw_pair", "find_windows"]

PairObjective = Literal["next", "swap"]
LEAST_TOKENS = 8
"""Shorter windows are left out: there is nothing to learn from two segments of them."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Places of windows in the joined chunks, arrays of one length.

    Attributes:
        starts: First token, counted over all chunks, int64.
        lengths: Tokens, int32.
        documents: Which document it is of, int64.
    """

    starts: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray


def find_windows(chunks: Sequence[np.ndarray], *, end: int, longest: int) -> Windows:
    """All windows of at most ``longest`` tokens, in the order of the store.

    Args:
        chunks: Token chunks; a document goes on over the end of a chunk, a window does not.
        end: Token that ends a document.
        longest: Tokens of a window.
    """
    found, offset, document = [], 0, 0
    for chunk in chunks:
        ends = np.flatnonzero(chunk == end)
        begins = np.concatenate(([0], ends + 1))
        lengths = np.append(ends, len(chunk)) - begins
        counts = -(-lengths // longest)
        counts[lengths < LEAST_TOKENS] = 0
        runs = np.repeat(np.arange(len(lengths)), counts)
        number = np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts, counts)
        first = number * lengths[runs] // counts[runs]
        after = (number + 1) * lengths[runs] // counts[runs]
        found.append((offset + begins[runs] + first, after - first, document + runs))
        offset, document = offset + len(chunk), document + len(ends)
    starts, sizes, documents = (np.concatenate(parts) for parts in zip(*found, strict=True)) if found else (np.empty(0),) * 3
    return Windows(starts=starts.astype(np.int64), lengths=sizes.astype(np.int32), documents=documents.astype(np.int64))


def draw_pair(
    tokens: np.ndarray, other: np.ndarray | None, *, room: int, draws: Draws, vocabulary: Vocabulary
) -> tuple[np.ndarray, np.ndarray, int]:
    """Two segments of a window, and 0 if the second follows the first, 1 (in half of all cases) if it does not.

    Args:
        tokens: The window.
        other: A window of another document: a part of it is the second segment where that does not follow (next-sentence prediction,
            arXiv 1810.04805, section 3.1). None: the two segments change places instead (sentence order, arXiv 1909.11942, section 3.1).
        room: Tokens of both segments together.
        draws: Random numbers of the sample.
        vocabulary: Tells where lines and words begin.
    """
    cut = _draw_cut(tokens, draws, vocabulary)
    first, second = tokens[:cut], tokens[cut:]
    if not draws.chance(0.5):
        return first, second, 0
    if other is None:
        return second, first, 1
    begin = _draw_cut(other, draws, vocabulary)
    return first, other[begin : begin + room - len(first)], 1


def _draw_cut(tokens: np.ndarray, draws: Draws, vocabulary: Vocabulary) -> int:
    """Where a window is divided: in front of a line if there is more than one, else in front of a word, else anywhere."""
    lines = np.flatnonzero(tokens[:-1] == vocabulary.newline) + 1
    words = vocabulary.word_starts(tokens)[1:]
    places = next((found for found in (lines, words) if len(found)), np.arange(1, len(tokens)))
    return int(places[draws.below(len(places))[0]])
