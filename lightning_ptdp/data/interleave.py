"""In which turn several corpora give samples, so that every prefix holds each in its share.

The turns repeat with a period of D, in which corpus c has m_c turns. With ``weights = 0.5, 0.3,
0.2``::

    turns   0 1 0 2 0 1 0 2 1 0 | 0 1 0 2 ...           D = 10, m = 5, 3, 2

After any number n of turns corpus c has had between n m_c / D - 1 and n m_c / D + 1 of them: the
chairman assignment (Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980),
which is the closest that there is for any weights."""

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
    """The endless row of turns.

    Attributes:
        counts: m_c, turns of each corpus in a period.
        order: int64 (D,); whose turn it is.
        ranks: int64 (D,); how many turns of that corpus the period had before.
    """

    counts: tuple[int, ...]
    order: np.ndarray
    ranks: np.ndarray

    @classmethod
    def of(cls, weights: Sequence[float]) -> Turns:
        """Turns in the ratio of the weights, which need not add up to 1.

        Exact for weights whose ratios are fractions over at most 65,536, as decimals of four digits
        are; else to within 1 / 65,536.

        Raises:
            ValueError: A weight is not a positive number, or so small beside the others that its
                corpus would never be read.
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
                f"weight={small!r} is less than one sample in {_LONGEST}: leave that corpus out "
                "or enlarge its weight"
            )
        order = _assign(counts)
        ranks = np.empty_like(order)
        for corpus, count in enumerate(counts):
            ranks[order == corpus] = np.arange(count)
        return cls(counts=counts, order=order, ranks=ranks)

    def at(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whose turn each number is, and how many turns that corpus had before; int64 arrays of the
        same shape."""
        periods, places = np.divmod(numbers, len(self.order))
        corpora = self.order[places]
        return corpora, periods * np.array(self.counts)[corpora] + self.ranks[places]

    def prefix(self, sizes: Sequence[int]) -> int:
        """The greatest number of turns in which no corpus has more than its size."""
        last = []
        for corpus, (count, size) in enumerate(zip(self.counts, sizes, strict=True)):
            periods, rank = divmod(size, count)
            # The turn that would be one too many.
            last.append(periods * len(self.order) + int(np.flatnonzero(self.order == corpus)[rank]))
        return min(last)


def _counts(weights: list[Fraction]) -> tuple[int, ...]:
    """Turns in a period: the weights' ratios in lowest terms, or the nearest of the longest
    period."""
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
    """Tijdeman's rule, in integers: of the corpora that are behind by 1 / (2k - 2) or more, the one
    that can wait the least."""
    period, corpora = sum(counts), len(counts)
    order = np.zeros(period, np.int64)
    if corpora == 1:
        return order
    # All in units of 1 / (D (2k - 2)).
    scale = 2 * corpora - 2
    share = np.array(counts, np.int64) * scale
    owed = np.zeros(corpora, np.int64)
    limit = period * (scale - 1)
    for turn in range(period):
        owed += share
        # Turns until a corpus would be too far behind; the others have had their share.
        patience = np.where(owed >= period, (limit - owed) / share, np.inf)
        chosen = int(patience.argmin())
        order[turn] = chosen
        owed[chosen] -= period * scale
    return order
