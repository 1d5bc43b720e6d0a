"""Closed forms of what a schedule costs: microbatches held, bubble, waiting for messages.

For hundreds of candidates there is no time to build schedules; these formulas are held against the simulator in the tests. A unit is
one rank's forward of one microbatch through all of its stages, and its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["CLOSED_FORMS", "ClosedForm", "least_microbatches"]


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """A schedule in formulas of p, v and m, valid from ``least_microbatches`` on.

    Attributes:
        splits_backward: Whether weight gradients are actions of their own.
        held: (p, v, m, rank) -> the most activations (a microbatch in one stage) that the rank holds; at least as many.
        bubble: (p, v, F, B, W) -> idle seconds of a rank in a step, where a rank's whole forward, whole backward and the weight
            gradients in it take F, B and W.
        waits: (p, v, m) -> how many messages the step waits for.
        source: Where the formula of the bubble is from.
    """

    splits_backward: bool = False
    held: Callable[[int, int, int, int], int]
    bubble: Callable[[int, int, float, float, float], float]
    waits: Callable[[int, int, int], float]
    source: str


def _waits_1f1b(p: int, v: int, m: int) -> float:
    # A rank's forward and backward alternate, so that most microbatches wait for a message in each direction.
    return 2 * ((p - 1) * -(-m // p) + p - 2)


def _held_interleaved(p: int, v: int, m: int, rank: int) -> int:
    # Microbatches visit a chunk in groups of p; what is left over makes one group larger.
    return min(v * m, (p + m % p) * (v - 1) + 2 * (p - rank - 1) + 1)


CLOSED_FORMS: Mapping[str, ClosedForm] = MappingProxyType(
    {
        "gpipe": ClosedForm(
            held=lambda p, v, m, rank: v * m,
            bubble=lambda p, v, forward, backward, weight: (p - 1) * (forward + backward) / v,
            waits=lambda p, v, m: 2 * (p * v - 1),
            source="arXiv 2104.04473, section 2.2.1",
        ),
        "1f1b": ClosedForm(
            held=lambda p, v, m, rank: min(m, p - rank),
            bubble=lambda p, v, forward, backward, weight: (p - 1) * (forward + backward),
            waits=_waits_1f1b,
            source="arXiv 2104.04473, section 2.2.1",
        ),
        "interleaved_1f1b": ClosedForm(
            held=_held_interleaved,
            bubble=lambda p, v, forward, backward, weight: (p - 1) * (forward + backward) / v,
            waits=lambda p, v, m: 2 * (p * v - 1),
            source="arXiv 2104.04473, section 2.2.2",
        ),
        "zb_h1": ClosedForm(
            splits_backward=True,
            held=lambda p, v, m, rank: min(m, p),
            bubble=lambda p, v, forward, backward, weight: (p - 1) * max(0.0, forward + backward - 2 * weight),
            waits=lambda p, v, m: 4 * (p - 1),
            source="arXiv 2401.10241, section 3",
        ),
        "zb_v": ClosedForm(
            splits_backward=True,
            held=lambda p, v, m, rank: min(2 * m, 2 * p),
            bubble=lambda p, v, forward, backward, weight: (p - 1) * max(forward, backward - weight) / 2,
            waits=lambda p, v, m: 6 * (p - 1),
            source="arXiv 2401.10241, section 6",
        ),
    }
)
"""The schedules that the planner searches, by name."""


def least_microbatches(schedule: str, p: int) -> int:
    """From how many microbatches on the closed form of ``schedule`` holds; with fewer a schedule has no advantage over 1F1B."""
    return {"interleaved_1f1b": p, "zb_h1": p, "zb_v": 2 * p}.get(schedule, 1)
