"""Windows of a token store, pairs of segments drawn from them, and masked words, for a BERT.

A window never spans two documents. A document is cut into windows of whole lines, each as large as
possible. A window is cut between lines into two segments. The beginning and end of a segment
therefore reveal neither the order of two segments nor their origin::

    store     l0 l0 NL l1 NL l2 l2 NL END l3 l3 NL ...       room for 5 tokens
    windows   [l0 l0 NL l1 NL] [l2 l2 NL] [l3 l3 NL ...]

The positions of all windows are found once (about a second for 10 million tokens). A window takes
20 bytes of memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_ptdp.base.random import derive_seed
from lightning_ptdp.data.tokenizer import Tokenizer

PairObjective = Literal["next", "swap"]
LEAST_TOKENS = 8
"""Minimum length of a window; two segments of a shorter one teach nothing."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Positions of windows in the joined chunks, as arrays of one length.

    Attributes:
        starts: First token, counted over all chunks, int64.
        lengths: Number of tokens, int32.
        documents: Number of the window's document, int64.
    """

    starts: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray


def find_windows(chunks: Iterable[np.ndarray], *, end: int, newline: int, longest: int) -> Windows:
    """Return all windows of at most ``longest`` tokens, in the order of the store.

    Args:
        chunks: Token chunks. A document may continue in the next chunk, a window may not.
        end: Token that ends a document.
        newline: Token that ends a line. Lines longer than half a window are cut anywhere.
        longest: Maximum number of tokens of a window.
    """
    starts = array("q")
    lengths = array("i")
    documents = array("q")
    offset = document = 0
    for chunk in chunks:
        lines = (np.flatnonzero(chunk == newline) + 1).tolist()
        ends = np.flatnonzero(chunk == end).tolist()
        begin = 0
        for number, stop in enumerate((*ends, len(chunk))):
            for first, window_end in _cut(begin, stop, lines, longest):
                starts.append(offset + first)
                lengths.append(window_end - first)
                documents.append(document + number)
            begin = stop + 1
        offset += len(chunk)
        document += len(ends)
    return Windows(
        starts=np.asarray(starts),
        lengths=np.asarray(lengths),
        documents=np.asarray(documents),
    )


def _cut(begin: int, stop: int, lines: Sequence[int], longest: int) -> Iterator[tuple[int, int]]:
    """Yield (first token, one past the last) of the windows of one document."""
    while begin < stop:
        window_end = min(begin + longest, stop)
        if window_end < stop:
            index = bisect_right(lines, window_end) - 1
            if index >= 0 and lines[index] > begin + longest // 2:
                window_end = lines[index]
        if window_end - begin >= LEAST_TOKENS:
            yield begin, window_end
        begin = window_end


def draw_pair(
    tokens: np.ndarray,
    other: np.ndarray | None,
    *,
    room: int,
    draws: Draws,
    vocabulary: WordVocabulary,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Draw two segments and their label.

    The label is 0 if the second segment follows the first, and 1 (in half of all cases) if it does
    not.

    Args:
        tokens: The window.
        other: A window of another document. A part of it is the second segment if the label is 1
            (next-sentence prediction, arXiv 1810.04805, section 3.1). None: the two segments are
            exchanged instead (sentence order, arXiv 1909.11942, section 3.1).
        room: Maximum number of tokens of both segments together.
        draws: Random numbers of the sample.
        vocabulary: Vocabulary, which determines where lines and words begin.
    """
    cut = _draw_cut(tokens, draws, vocabulary)
    first = tokens[:cut]
    second = tokens[cut:]
    if draws.uniform(1)[0] >= 0.5:
        return first, second, 0
    if other is None:
        return second, first, 1
    begin = _draw_cut(other, draws, vocabulary)
    return first, other[begin : begin + room - len(first)], 1


def _draw_cut(tokens: np.ndarray, draws: Draws, vocabulary: WordVocabulary) -> int:
    """Draw the position at which a window is divided.

    It is before a line if there is more than one, otherwise before a word, otherwise anywhere.
    """
    lines = np.flatnonzero(tokens[:-1] == vocabulary.newline) + 1
    words = vocabulary.word_starts(tokens)[1:]
    positions = next((cuts for cuts in (lines, words) if len(cuts)), np.arange(1, len(tokens)))
    return int(positions[draws.below(len(positions))[0]])


# ---- Random numbers that depend only on a key, for choices about one sample ----------------------
#
# They are computed from the raw numbers of numpy's PCG64, seeded with a hash of the key. numpy
# guarantees these for every version, unlike those of its distributions.


class Draws:
    """An endless sequence of numbers, determined by the key (integers and strings)."""

    def __init__(self, *key: object) -> None:
        self._bits = np.random.PCG64(derive_seed(*key))

    def uniform(self, count: int) -> np.ndarray:
        """Return the next ``count`` numbers, float64 in [0, 1)."""
        raw = np.asarray(self._bits.random_raw(count), np.uint64)
        return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def below(self, limit: int, count: int = 1) -> np.ndarray:
        """Return ``count`` integers from 0 to ``limit - 1``, int64."""
        return (self.uniform(count) * limit).astype(np.int64)

    def shuffled(self, count: int) -> np.ndarray:
        """Return the numbers 0 to ``count - 1`` in random order."""
        return np.argsort(self.uniform(count), kind="stable")


# ---- Whole-word masking: choice of the tokens to predict, and their replacements -----------------


_MASKED = 0.8
_RANDOM = 0.1
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
    uniform = draws.uniform(len(tokens))
    random = vocabulary.ordinary[draws.below(len(vocabulary.ordinary), len(tokens))]
    return np.where(
        uniform < _MASKED, vocabulary.mask, np.where(uniform < _MASKED + _RANDOM, random, tokens)
    )


# ---- Word boundaries of tokens, looked up by id without reading the text -------------------------

CLS = "[CLS]"
SEP = "[SEP]"
MASK = "[MASK]"
SPECIAL_PIECES = (CLS, SEP, MASK)


@dataclass(frozen=True, kw_only=True)
class WordVocabulary:
    """Properties of a tokenizer that masking needs.

    A word is a run of letters, digits and underscores with the space before it. Every other
    character is a word of its own, as is every newline and every run of spaces. A piece belongs to
    the word of its first character.

    Attributes:
        pad, cls, sep, mask: Special ids.
        end: Id that ends a document.
        newline: Id of the newline.
        ordinary: Ids that occur in text, int32.
        begins: By id, whether a word begins with this piece.
        closes: By id, whether a word begins after this piece.
    """

    pad: int
    cls: int
    sep: int
    mask: int
    end: int
    newline: int
    ordinary: np.ndarray
    begins: np.ndarray
    closes: np.ndarray

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> WordVocabulary:
        """Read the properties of a tokenizer.

        Raises:
            TokenizerError: It has no [CLS], [SEP] or [MASK].
        """
        pieces = tokenizer.pieces
        ends = [_ends_of(piece) for piece in pieces]
        return cls(
            pad=tokenizer.pad_id,
            cls=tokenizer.control_id(CLS),
            sep=tokenizer.control_id(SEP),
            mask=tokenizer.control_id(MASK),
            end=tokenizer.eos_id,
            newline=pieces.index("\n"),
            ordinary=np.array(
                [index for index in range(len(pieces)) if tokenizer.is_text(index)], np.int32
            ),
            begins=np.array([not _continues(first) for first, _ in ends]),
            closes=np.array([not _continues(last) for _, last in ends]),
        )

    def word_starts(self, tokens: np.ndarray) -> np.ndarray:
        """Return positions at which words start, the first token included; int64, ascending."""
        starts = self.begins[tokens]
        starts[1:] |= self.closes[tokens[:-1]]
        starts[:1] = True
        return np.flatnonzero(starts)


def _ends_of(piece: str) -> tuple[str, str]:
    """Return the first and last character; a byte above 127 counts as a letter."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        value = int(piece[3:5], 16)
        piece = chr(value) if value < 128 else "x"
    return piece[0], piece[-1]


def _continues(character: str) -> bool:
    return character.isalnum() or character == "_"
