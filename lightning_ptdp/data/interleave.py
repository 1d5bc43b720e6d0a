"""The order in which several corpora supply samples.

Every prefix of the order holds each corpus in its share. The turns repeat with a period of D, in
which corpus c has m_c turns. With ``weights = 0.5, 0.3, 0.2``::

    turns   0 1 0 2 0 1 0 2 1 0 | 0 1 0 2 ...           D = 10, m = 5, 3, 2

After any number n of turns, corpus c has had between n m_c / D - 1 and n m_c / D + 1 of them. This
is the chairman assignment (Tijdeman, "The chairman assignment problem", Discrete Mathematics 32,
1980), the closest assignment that exists for any weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

__all__ = ["Turns"]

_LONGEST = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The endless sequence of turns.

    Attributes:
        counts: m_c, turns of each corpus in a period.
        order: int64 (D,); the corpus of each turn.
        ranks: int64 (D,); the number of earlier turns of that corpus in the period.
    """

    counts: tuple[int, ...]
    order: np.ndarray
    ranks: np.ndarray

    @classmethod
    def of(cls, weights: Sequence[float]) -> Turns:
        """Create turns in the ratio of the weights, which need not add up to 1.

        The ratio is exact for weights whose ratios are fractions with a denominator of at most
        65,536, such as decimals of four digits. Otherwise it is within 1 / 65,536.

        Raises:
            ValueError: A weight is not a positive number, or is so small that its corpus would
                never be read.
        """
        for weight in weights:
            if (
                isinstance(weight, bool)
                or not isinstance(weight, int | float)
                or not 0 < weight < math.inf
            ):
                raise ValueError(f"weight={weight!r} must be a number greater than 0")
        counts = _counts([Fraction(str(weight)) for weight in weights])
        if min(counts) < 1:
            small = weights[counts.index(0)]
            raise ValueError(
                f"weight={small!r} is less than one sample in {_LONGEST}. Leave this corpus "
                "out, or increase its weight"
            )
        order = _assign(counts)
        ranks = np.empty_like(order)
        for corpus, count in enumerate(counts):
            ranks[order == corpus] = np.arange(count)
        return cls(counts=counts, order=order, ranks=ranks)

    def at(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus of each turn, and the number of its earlier turns.

        Both are int64 arrays of the shape of ``numbers``.
        """
        periods, places = np.divmod(numbers, len(self.order))
        corpora = self.order[places]
        return corpora, periods * np.array(self.counts)[corpora] + self.ranks[places]

    def prefix(self, sizes: Sequence[int]) -> int:
        """Return the largest number of turns in which no corpus exceeds its size."""
        last = []
        for corpus, (count, size) in enumerate(zip(self.counts, sizes, strict=True)):
            periods, rank = divmod(size, count)
            # The first turn that exceeds the size.
            last.append(periods * len(self.order) + int(np.flatnonzero(self.order == corpus)[rank]))
        return min(last)


def _counts(weights: list[Fraction]) -> tuple[int, ...]:
    """Return the turns of each corpus in a period.

    These are the ratios of the weights in lowest terms, or the nearest ones with the longest
    period.
    """
    shares = [weight / sum(weights) for weight in weights]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= _LONGEST:
        return tuple(int(share * period) for share in shares)
    counts = [int(share * _LONGEST) for share in shares]
    behind = sorted(
        range(len(shares)), key=lambda corpus: counts[corpus] - shares[corpus] * _LONGEST
    )
    for corpus in behind[: _LONGEST - sum(counts)]:
        counts[corpus] += 1
    return tuple(counts)


def _assign(counts: tuple[int, ...]) -> np.ndarray:
    """Apply Tijdeman's rule, in integers.

    Of the corpora that are behind by 1 / (2k - 2) or more, the one that can wait the least is next.
    """
    period, corpora = sum(counts), len(counts)
    order = np.zeros(period, np.int64)
    if corpora == 1:
        return order
    # All values are in units of 1 / (D (2k - 2)).
    scale = 2 * corpora - 2
    share = np.array(counts, np.int64) * scale
    owed = np.zeros(corpora, np.int64)
    limit = period * (scale - 1)
    for turn in range(period):
        owed += share
        # Turns until a corpus is too far behind; corpora that have had their share can wait.
        patience = np.where(owed >= period, (limit - owed) / share, np.inf)
        chosen = int(patience.argmin())
        order[turn] = chosen
        owed[chosen] -= period * scale
    return order
