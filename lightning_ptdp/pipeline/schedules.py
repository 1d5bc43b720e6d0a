"""The schedules: pure functions from sizes to the order in which each rank computes.

A compute order has forward and backward actions only; ``build_schedule`` adds communication (lowering.py) and proves the result
(verify.py). To add a schedule: write its function here and name it in ``_ORDERS``.

In the timelines below forward and backward take one column each; they are drawn by ``simulate(...).text()``.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Sequence
from itertools import pairwise

from lightning_ptdp.pipeline.actions import Action, ActionKind, Schedule
from lightning_ptdp.pipeline.lowering import lower
from lightning_ptdp.pipeline.verify import verify_schedule

__all__ = ["SCHEDULES", "build_schedule", "forward_only", "gpipe", "interleaved_one_f_one_b", "one_f_one_b"]

Orders = tuple[tuple[Action, ...], ...]
"""Compute actions of each rank, in order."""

Unit = tuple[int, int]
"""(chunk, microbatch): what a rank computes at once."""


def gpipe(p: int, v: int, m: int) -> Orders:
    """All forwards, then all backwards (arXiv 1811.06965).

    Bubble over ideal time (p-1)/(v m) for m >= p; a rank holds all v m activations::

        rank 0  F0.0 F0.1 F0.2 F0.3 F0.4 F0.5 F0.6 F0.7                               B0.0 B0.1 B0.2 B0.3 B0.4 B0.5 B0.6 B0.7
        rank 1       F1.0 F1.1 F1.2 F1.3 F1.4 F1.5 F1.6 F1.7                     B1.0 B1.1 B1.2 B1.3 B1.4 B1.5 B1.6 B1.7
        rank 2            F2.0 F2.1 F2.2 F2.3 F2.4 F2.5 F2.6 F2.7           B2.0 B2.1 B2.2 B2.3 B2.4 B2.5 B2.6 B2.7
        rank 3                 F3.0 F3.1 F3.2 F3.3 F3.4 F3.5 F3.6 F3.7 B3.0 B3.1 B3.2 B3.3 B3.4 B3.5 B3.6 B3.7

    With v > 1, microbatches visit the chunks in groups as in ``interleaved_one_f_one_b``. (All m of them through one chunk
    at a time, arXiv 2211.05953, would let the last rank send m - p results before the first rank takes one.)
    """
    forwards, backwards = _in_groups(p, range(v), m), _in_groups(p, range(v)[::-1], m)
    return tuple(_alternate(rank, p, forwards, backwards, warmup=v * m) for rank in range(p))


def one_f_one_b(p: int, v: int, m: int) -> Orders:
    """A backward as early as possible, then one forward, one backward (PipeDream-flush: arXiv 2104.04473, section 2.2.1).

    Bubble over ideal time (p-1)/m; rank r holds min(m, p - r) activations. v is 1::

        rank 0  F0.0 F0.1 F0.2 F0.3                B0.0 F0.4 B0.1 F0.5 B0.2 F0.6 B0.3 F0.7 B0.4      B0.5      B0.6      B0.7
        rank 1       F1.0 F1.1 F1.2           B1.0 F1.3 B1.1 F1.4 B1.2 F1.5 B1.3 F1.6 B1.4 F1.7 B1.5      B1.6      B1.7
        rank 2            F2.0 F2.1      B2.0 F2.2 B2.1 F2.3 B2.2 F2.4 B2.3 F2.5 B2.4 F2.6 B2.5 F2.7 B2.6      B2.7
        rank 3                 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3 F3.4 B3.4 F3.5 B3.5 F3.6 B3.6 F3.7 B3.7
    """
    assert v == 1
    units = [(0, microbatch) for microbatch in range(m)]
    return tuple(_alternate(rank, p, units, units, warmup=p - rank - 1) for rank in range(p))


def interleaved_one_f_one_b(p: int, v: int, m: int) -> Orders:
    """1F1B over v chunks a rank; a group of microbatches visits every chunk before the next (arXiv 2104.04473, section 2.2.2).

    Bubble over ideal time (p-1)/(v m) for m >= p; with q microbatches in the largest group, rank r holds at most
    (v-1) q + 2 (p-r-1) + 1 activations, each of a v-th of the rank's layers::

        rank 0  F0.0 F0.1 F0.2 F0.3 F4.0 F4.1 F4.2 F4.3                B4.0      B4.1      B4.2      B4.3 B0.0 B0.1 B0.2 B0.3
        rank 1       F1.0 F1.1 F1.2 F1.3 F5.0 F5.1 F5.2 F5.3      B5.0      B5.1      B5.2      B5.3 B1.0 B1.1 B1.2 B1.3
        rank 2            F2.0 F2.1 F2.2 F2.3 F6.0 F6.1 F6.2 B6.0 F6.3 B6.1      B6.2      B6.3 B2.0 B2.1 B2.2 B2.3
        rank 3                 F3.0 F3.1 F3.2 F3.3 F7.0 B7.0 F7.1 B7.1 F7.2 B7.2 F7.3 B7.3 B3.0 B3.1 B3.2 B3.3

    Any m: the paper takes groups of p and wants p to divide m. Here a remainder is spread over the groups (m = 9, p = 4: groups
    of 5 and 4), which keeps the paper's bubble for every m >= p. A shorter last group would cost time, and can deadlock: rank 0
    waits for the last rank and that for rank 0.
    """
    forwards, backwards = _in_groups(p, range(v), m), _in_groups(p, range(v)[::-1], m)
    first = len(_groups(p, m)[0])
    return tuple(_alternate(rank, p, forwards, backwards, warmup=(v - 1) * first + 2 * (p - rank - 1)) for rank in range(p))


def forward_only(p: int, v: int, m: int) -> Orders:
    """Forwards alone, for evaluation, in the order of the interleaved schedule.

    Bubble over ideal time (p-1)/(v m) for m >= p::

        rank 0  F0.0 F0.1 F0.2 F0.3 F4.0 F4.1 F4.2 F4.3 F0.4 F0.5 F0.6 F0.7 F4.4 F4.5 F4.6 F4.7
        rank 1       F1.0 F1.1 F1.2 F1.3 F5.0 F5.1 F5.2 F5.3 F1.4 F1.5 F1.6 F1.7 F5.4 F5.5 F5.6 F5.7
        rank 2            F2.0 F2.1 F2.2 F2.3 F6.0 F6.1 F6.2 F6.3 F2.4 F2.5 F2.6 F2.7 F6.4 F6.5 F6.6 F6.7
        rank 3                 F3.0 F3.1 F3.2 F3.3 F7.0 F7.1 F7.2 F7.3 F3.4 F3.5 F3.6 F3.7 F7.4 F7.5 F7.6 F7.7
    """
    forwards = _in_groups(p, range(v), m)
    return tuple(_alternate(rank, p, forwards, [], warmup=v * m) for rank in range(p))


def _groups(p: int, m: int) -> list[range]:
    """Microbatches in groups of p or slightly more, largest first; one group if m < 2 p."""
    count = max(m // p, 1)
    size, longer = divmod(m, count)
    starts = [index * size + min(index, longer) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _in_groups(p: int, chunks: Sequence[int], m: int) -> list[Unit]:
    """Each group visits every chunk before the next group starts."""
    return [(chunk, microbatch) for group in _groups(p, m) for chunk in chunks for microbatch in group]


def _lookahead(p: int, v: int, m: int) -> int:
    """How many compute actions ahead a receive is posted (lowering.py).

    One is enough to overlap. A group of more than p microbatches lets the last rank finish a chunk before the first rank turns
    to the next one; where a send waits for its receive, ranks then stay together only if each surplus microbatch has two
    actions (a forward and a backward) more to be posted in.
    """
    surplus = len(_groups(p, m)[0]) - p
    return max(1, 2 * surplus) if v > 1 else 1


def _alternate(rank: int, p: int, forwards: Sequence[Unit], backwards: Sequence[Unit], *, warmup: int) -> tuple[Action, ...]:
    """``warmup`` forwards, then one forward and one backward in turn until the forwards are used up, then backwards."""
    order = [_action(ActionKind.FORWARD, unit, rank, p) for unit in forwards[:warmup]]
    steady = forwards[warmup:]
    for forward, backward in zip(steady, backwards, strict=False):
        order.append(_action(ActionKind.FORWARD, forward, rank, p))
        order.append(_action(ActionKind.BACKWARD, backward, rank, p))
    order += [_action(ActionKind.BACKWARD, unit, rank, p) for unit in backwards[len(steady) :]]
    return tuple(order)


def _action(kind: ActionKind, unit: Unit, rank: int, p: int) -> Action:
    chunk, microbatch = unit
    return Action(kind, chunk * p + rank, microbatch)


_ORDERS: dict[str, Callable[[int, int, int], Orders]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_one_f_one_b,
}

SCHEDULES: tuple[str, ...] = (*_ORDERS, "auto")
"""The names that ``build_schedule`` takes."""


def build_schedule(
    name: str,
    *,
    pipeline_parallel_size: int,
    virtual_pipeline_size: int = 1,
    num_microbatches: int,
    training: bool = True,
) -> Schedule:
    """The verified schedule of one step; the same object for the same arguments.

    Without a pipeline (p = 1) every schedule is forward and backward in turn, so that one microbatch is held at a time.

    Args:
        name: One of ``SCHEDULES``; ``"auto"`` is 1F1B for v = 1 and interleaved 1F1B for v > 1.
        pipeline_parallel_size: p.
        virtual_pipeline_size: v, stages a rank.
        num_microbatches: m, any positive number.
        training: ``False`` gives forwards alone, whatever the schedule; the result is then named ``"forward_only"``.

    Raises:
        ValueError: An unknown name, a size that is not a positive integer, or a v that the schedule cannot use.
    """
    sizes = {
        "pipeline_parallel_size": pipeline_parallel_size,
        "virtual_pipeline_size": virtual_pipeline_size,
        "num_microbatches": num_microbatches,
    }
    for field, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{field}={value!r} must be a positive integer")
    _check_name(name, pipeline_parallel_size, virtual_pipeline_size)
    if name == "auto":
        name = "1f1b" if virtual_pipeline_size == 1 else "interleaved_1f1b"
    return _build(name if training else "forward_only", pipeline_parallel_size, virtual_pipeline_size, num_microbatches)


def _check_name(name: str, p: int, v: int) -> None:
    if name not in SCHEDULES:
        nearest = difflib.get_close_matches(str(name), SCHEDULES, n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(f"schedule={name!r} is unknown: {hint}The schedules are {', '.join(map(repr, SCHEDULES))}")
    if p == 1 and v > 1:
        raise ValueError(
            f"virtual_pipeline_size={v} needs a pipeline to interleave: set pipeline_parallel_size to 2 or more, or "
            "virtual_pipeline_size=1"
        )
    if name == "1f1b" and v > 1:
        raise ValueError(
            f"schedule='1f1b' holds one stage a rank, but virtual_pipeline_size={v}: use schedule='interleaved_1f1b' (or 'auto'), "
            "or virtual_pipeline_size=1"
        )
    if name == "interleaved_1f1b" and v == 1 and p > 1:
        raise ValueError(
            "schedule='interleaved_1f1b' needs two or more stages a rank, but virtual_pipeline_size=1: set "
            "virtual_pipeline_size to 2 or more, or use schedule='1f1b' (or 'auto')"
        )


# A run uses few sizes (training, evaluation, a shorter last batch); a large schedule takes some 100 MB.
@functools.lru_cache(maxsize=8)
def _build(name: str, p: int, v: int, m: int) -> Schedule:
    training = name != "forward_only"
    order = forward_only if not training else one_f_one_b if p == 1 else _ORDERS[name]
    programs = lower(order(p, v, m), pipeline_parallel_size=p, num_stages=p * v, lookahead=_lookahead(p, v, m))
    schedule = Schedule(name, p, v, m, programs)
    verify_schedule(schedule, training=training)
    return schedule
