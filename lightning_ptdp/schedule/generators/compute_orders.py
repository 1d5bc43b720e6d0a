"""Compute orders of the package's schedules, and a small language for their phases."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lightning_ptdp.schedule.actions import Action, ActionKind
from lightning_ptdp.schedule.unit_run import Orders, weights_in_gaps
from lightning_ptdp.world.axes import StagePlacement, stages_of_rank


def in_turns(
    stages: Sequence[int], num_microbatches: int, *phases: tuple[str, int]
) -> tuple[Action, ...]:
    """Return the compute order of one rank from its phases.

    The phase ``("F0 B1 W", 3)`` is three times the actions of its words. ``F0`` is the forward and
    ``B1`` the backward of that chunk on its next microbatch. ``W`` is the weight gradient that has
    waited longest. Actions of microbatches that do not exist are left out, so that phases may be
    written for more microbatches than there are. Without its last microbatches an order remains
    possible.

    Args:
        stages: The rank's stages by chunk.
        num_microbatches: m.
        phases: Words and their number of repetitions.
    """
    order: list[Action] = []
    next_microbatch = {(kind, chunk): 0 for kind in "FB" for chunk in range(len(stages))}
    deferred: deque[tuple[int, int]] = deque()
    for words, times in phases:
        for word in words.split() * times:
            if word == "W":
                stage, microbatch = deferred.popleft()
            else:
                chunk = int(word[1:])
                stage = stages[chunk]
                microbatch = next_microbatch[word[0], chunk]
                next_microbatch[word[0], chunk] += 1
            if word[0] == "B":
                deferred.append((stage, microbatch))
            if microbatch < num_microbatches:
                order.append(Action(ActionKind(word[0]), stage, microbatch))
    return tuple(order)


def groups(p: int, m: int, size: int | None = None) -> list[int]:
    """Return the sizes of groups of at most ``size`` microbatches (default p), largest first.

    A group never has fewer than p microbatches if there are as many.
    """
    count = min(-(-m // (size or p)), max(m // p, 1))
    base, remainder = divmod(m, count)
    return [base + (index < remainder) for index in range(count)]


def in_groups(
    stages: Sequence[int], m: int, sizes: Sequence[int], *, warmup: int, forwards_only: bool = False
) -> tuple[Action, ...]:
    """Return the compute order of one rank for groups of microbatches.

    Each group visits all chunks before the next group. The order has ``warmup`` forwards, then one
    forward and one backward in turn until all forwards are used, then the remaining backwards.
    """
    chunks = range(len(stages))
    forwards = [f"F{chunk}" for size in sizes for chunk in chunks for _ in range(size)]
    backwards = (
        []
        if forwards_only
        else [f"B{chunk}" for size in sizes for chunk in reversed(chunks) for _ in range(size)]
    )
    steady = [word for pair in zip(forwards[warmup:], backwards, strict=False) for word in pair]
    words = (*forwards[:warmup], *steady, *backwards[len(steady) // 2 :])
    return in_turns(stages, m, (" ".join(words), 1))


# ---- Schedules in which forwards and backwards alternate -----------------------------------------


def one_f_one_b(p: int, v: int, m: int) -> Orders:
    """Return 1F1B: backwards as early as possible, then one forward and one backward in turn.

    This is PipeDream-flush (arXiv 2104.04473, section 2.2.1). Bubble over ideal time is (p-1)/m.
    The rank r holds min(m, p - r) activations. v is 1::

        rank 0  F0.0 F0.1 F0.2 F0.3                B0.0 F0.4 B0.1 F0.5 B0.2 F0.6 B0.3 F0.7 B0.4      B0.5      B0.6      B0.7
        rank 1       F1.0 F1.1 F1.2           B1.0 F1.3 B1.1 F1.4 B1.2 F1.5 B1.3 F1.6 B1.4 F1.7 B1.5      B1.6      B1.7
        rank 2            F2.0 F2.1      B2.0 F2.2 B2.1 F2.3 B2.2 F2.4 B2.3 F2.5 B2.4 F2.6 B2.5 F2.7 B2.6      B2.7
        rank 3                 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3 F3.4 B3.4 F3.5 B3.5 F3.6 B3.6 F3.7 B3.7
    """
    assert v == 1
    n = max(m, p)
    return tuple(
        in_turns(
            [rank], m, ("F0", p - rank - 1), ("F0 B0", n - (p - rank - 1)), ("B0", p - rank - 1)
        )
        for rank in range(p)
    )


def interleaved_one_f_one_b(p: int, v: int, m: int, group_size: int | None = None) -> Orders:
    """Return interleaved 1F1B: 1F1B over v chunks per rank (arXiv 2104.04473, section 2.2.2).

    A group of microbatches visits every chunk before the next group. Bubble over ideal time is
    (p-1)/(v m) for m >= p. With q microbatches in the largest group, rank r holds at most (v-1) q +
    2 (p-r-1) + 1 activations, each of a v-th of the rank's layers::

        rank 0  F0.0 F0.1 F0.2 F0.3 F4.0 F4.1 F4.2 F4.3                B4.0      B4.1      B4.2      B4.3 B0.0 B0.1 B0.2 B0.3
        rank 1       F1.0 F1.1 F1.2 F1.3 F5.0 F5.1 F5.2 F5.3      B5.0      B5.1      B5.2      B5.3 B1.0 B1.1 B1.2 B1.3
        rank 2            F2.0 F2.1 F2.2 F2.3 F6.0 F6.1 F6.2 B6.0 F6.3 B6.1      B6.2      B6.3 B2.0 B2.1 B2.2 B2.3
        rank 3                 F3.0 F3.1 F3.2 F3.3 F7.0 B7.0 F7.1 B7.1 F7.2 B7.2 F7.3 B7.3 B3.0 B3.1 B3.2 B3.3

    m may be any number. The paper uses groups of p and requires that p divides m. Here a remainder
    is spread over the groups (m = 9, p = 4: groups of 5 and 4), which keeps the paper's bubble for
    every m >= p. A group of fewer than p would cost time and could deadlock: the first rank would
    wait for the last one, and the last one for the first.

    ``group_size``, at least p, allows larger groups: up to that many microbatches, as even as
    possible, never fewer than p. A message from chunk to chunk then has more computations to travel
    in, and more activations are held.
    """
    sizes = groups(p, m, group_size)
    return tuple(
        in_groups(
            stages_of_rank(p, v, rank, "loop"),
            m,
            sizes,
            warmup=(v - 1) * sizes[0] + 2 * (p - rank - 1),
        )
        for rank in range(p)
    )


# ---- Schedules with all forwards before all backwards, and with forwards alone -------------------
#
# In the timelines of this folder every action takes one column. ``simulate(...).text()`` draws
# them.


def gpipe(p: int, v: int, m: int) -> Orders:
    """Return GPipe: all forwards, then all backwards (arXiv 1811.06965).

    Bubble over ideal time is (p-1)/(v m) for m >= p. A rank holds all v m activations::

        rank 0  F0.0 F0.1 F0.2 F0.3 F0.4 F0.5 F0.6 F0.7                               B0.0 B0.1 B0.2 B0.3 B0.4 B0.5 B0.6 B0.7
        rank 1       F1.0 F1.1 F1.2 F1.3 F1.4 F1.5 F1.6 F1.7                     B1.0 B1.1 B1.2 B1.3 B1.4 B1.5 B1.6 B1.7
        rank 2            F2.0 F2.1 F2.2 F2.3 F2.4 F2.5 F2.6 F2.7           B2.0 B2.1 B2.2 B2.3 B2.4 B2.5 B2.6 B2.7
        rank 3                 F3.0 F3.1 F3.2 F3.3 F3.4 F3.5 F3.6 F3.7 B3.0 B3.1 B3.2 B3.3 B3.4 B3.5 B3.6 B3.7

    With v > 1, microbatches visit the chunks in groups as in ``interleaved_one_f_one_b``. (With all
    m of them through one chunk at a time, arXiv 2211.05953, the last rank could send m - p results
    before the first rank takes one.)
    """
    return tuple(
        in_groups(stages_of_rank(p, v, rank, "loop"), m, groups(p, m), warmup=v * m)
        for rank in range(p)
    )


def forward_only(p: int, v: int, m: int, placement: StagePlacement = "loop") -> Orders:
    """Return the order of forwards alone, for evaluation.

    In a loop, it is the order of the interleaved schedule. Bubble over ideal time is (p-1)/(v m)
    for m >= p::

        rank 0  F0.0 F0.1 F0.2 F0.3 F4.0 F4.1 F4.2 F4.3 F0.4 F0.5 F0.6 F0.7 F4.4 F4.5 F4.6 F4.7
        rank 1       F1.0 F1.1 F1.2 F1.3 F5.0 F5.1 F5.2 F5.3 F1.4 F1.5 F1.6 F1.7 F5.4 F5.5 F5.6 F5.7
        rank 2            F2.0 F2.1 F2.2 F2.3 F6.0 F6.1 F6.2 F6.3 F2.4 F2.5 F2.6 F2.7 F6.4 F6.5 F6.6 F6.7
        rank 3                 F3.0 F3.1 F3.2 F3.3 F7.0 F7.1 F7.2 F7.3 F3.4 F3.5 F3.6 F3.7 F7.4 F7.5 F7.6 F7.7

    In a V, the two chunks alternate. Bubble over ideal time is (p-1)/m, and no order has less: all
    microbatches turn around on the last rank, p-1 stages from the start and p-1 from the end::

        rank 0  F0.0 F0.1 F0.2 F0.3                F7.0 F0.4 F7.1 F0.5 F7.2 F0.6 F7.3 F0.7 F7.4      F7.5      F7.6      F7.7
        rank 1       F1.0 F1.1 F1.2           F6.0 F1.3 F6.1 F1.4 F6.2 F1.5 F6.3 F1.6 F6.4 F1.7 F6.5      F6.6      F6.7
        rank 2            F2.0 F2.1      F5.0 F2.2 F5.1 F2.3 F5.2 F2.4 F5.3 F2.5 F5.4 F2.6 F5.5 F2.7 F5.6      F5.7
        rank 3                 F3.0 F4.0 F3.1 F4.1 F3.2 F4.2 F3.3 F4.3 F3.4 F4.4 F3.5 F4.5 F3.6 F4.6 F3.7 F4.7
    """
    ranks = [stages_of_rank(p, v, rank, placement) for rank in range(p)]
    if placement == "loop":
        return tuple(
            in_groups(stages, m, groups(p, m), warmup=v * m, forwards_only=True) for stages in ranks
        )
    assert v == 2
    n = max(m, p)
    return tuple(
        in_turns(stages, m, ("F0", p - rank), ("F1 F0", n - (p - rank)), ("F1", p - rank))
        for rank, stages in enumerate(ranks)
    )


# ---- Zero-bubble schedules (arXiv 2401.10241), which fill the bubble -----------------------------
#
# No other computation needs the weight gradients as input.


def zb_h1(p: int, v: int, m: int) -> Orders:
    """Return ZB-H1: 1F1B with the same memory and a third of the bubble.

    See section 3 and figure 3 (top). The rank r keeps r weight gradients waiting. So every rank
    holds min(m, p) activations, counted until W, and the input gradients go up the pipeline without
    waiting for W. The bubble per rank is (p-1)(T_F + T_B - T_W) for m >= p and T_W <= T_F, T_B.
    That of 1F1B, whose backward is B and W in one, is (p-1)(T_F + T_B + T_W). v is 1::

        rank 0  F0.0 F0.1 F0.2 F0.3                B0.0 W0.0 F0.4 B0.1 W0.1 F0.5 B0.2 W0.2 B0.3 W0.3 B0.4 W0.4 B0.5 W0.5
        rank 1       F1.0 F1.1 F1.2           B1.0 F1.3 B1.1 W1.0 F1.4 B1.2 W1.1 F1.5 B1.3 W1.2 B1.4 W1.3 B1.5 W1.4 W1.5
        rank 2            F2.0 F2.1      B2.0 F2.2 B2.1 F2.3 B2.2 W2.0 F2.4 B2.3 W2.1 F2.5 B2.4 W2.2 B2.5 W2.3 W2.4 W2.5
        rank 3                 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3 W3.0 F3.4 B3.4 W3.1 F3.5 B3.5 W3.2 W3.3 W3.4 W3.5
    """
    assert v == 1
    n = max(m, p)
    return tuple(
        in_turns(
            [rank],
            m,
            ("F0", p - rank - 1),
            ("F0 B0", rank),
            ("F0 B0 W", n - p + 1),
            ("B0 W", p - rank - 1),
            ("W", rank),
        )
        for rank in range(p)
    )


def zb_v(p: int, v: int, m: int) -> Orders:
    """Return ZB-V: two chunks in a V, without idle time inside (section 6, figure 8).

    The last stage is on the first rank, so that backwards start there at once. Weight gradients
    fill the gaps. With T_F = T_B = T_W and m >= 2p-1, a rank never waits between its first and its
    last action. The step takes 6 m + p-1 units for all m >= p, which is the minimum: the last rank
    cannot start before p-1. A rank holds at most 2p activations of a chunk each, counted until W:
    as much as 1F1B. v is 2::

        rank 0  F0.0 F0.1 F0.2 F0.3 F0.4 F0.5 F0.6 F7.0 B7.0 W7.0 F7.1 B7.1 W7.1 F7.2 B7.2 W7.2 F7.3
        rank 1       F1.0 F1.1 F1.2 F1.3 F1.4 F6.0 F1.5 F6.1 B6.0 W6.0 F6.2 B6.1 W6.1 F6.3 B6.2 W6.2
        rank 2            F2.0 F2.1 F2.2 F5.0 F2.3 F5.1 F2.4 F5.2 B5.0 W5.0 F5.3 B5.1 W5.1 F2.5 B2.0
        rank 3                 F3.0 F4.0 F3.1 F4.1 F3.2 F4.2 F3.3 F4.3 B4.0 W4.0 F3.4 B3.0 W3.0 F4.4

        rank 0  B7.3 W7.3 F0.7 B0.0 W0.0 F7.4 B7.4 W7.4 B0.1 W0.1 F7.5 B7.5 W7.5 B0.2 W0.2 F7.6 B7.6
        rank 1  F1.6 B1.0 W1.0 F6.4 B6.3 W6.3 F1.7 B1.1 W1.1 F6.5 B6.4 W6.4 B1.2 W1.2 F6.6 B6.5 W6.5
        rank 2  W2.0 F5.4 B5.2 W5.2 F2.6 B2.1 W2.1 F5.5 B5.3 W5.3 F2.7 B2.2 W2.2 F5.6 B5.4 W5.4 B2.3
        rank 3  B4.1 W4.1 F3.5 B3.1 W3.1 F4.5 B4.2 W4.2 F3.6 B3.2 W3.2 F4.6 B4.3 W4.3 F3.7 B3.3 W3.3

        rank 0  W7.6 B0.3 W0.3 F7.7 B7.7 B0.4 W7.7 B0.5 W0.4 B0.6 W0.5 B0.7 W0.6 W0.7
        rank 1  B1.3 W1.3 F6.7 B6.6 B1.4 B6.7 B1.5 W6.6 B1.6 W1.4 B1.7 W6.7 W1.5 W1.6 W1.7
        rank 2  W2.3 F5.7 B5.5 B2.4 B5.6 B2.5 B5.7 B2.6 W5.5 B2.7 W2.4 W5.6 W2.5 W5.7 W2.6 W2.7
        rank 3  F4.7 B4.4 B3.4 B4.5 B3.5 B4.6 B3.6 B4.7 B3.7 W4.4 W3.4 W4.5 W3.5 W4.6 W3.6 W4.7 W3.7
    """
    assert v == 2
    n = max(m, 2 * p - 1)
    orders = tuple(
        in_turns(
            stages_of_rank(p, v, rank, "v"),
            m,
            ("F0", 2 * (p - rank) - 1),
            ("F1 F0", rank),
            ("F1 B1", p - rank),
            ("F0 B0 F1 B1", n - 2 * p + rank + 1),
            ("B0 F1 B1", p - rank - 1),
            ("B0 B1", rank),
            ("B0", p - rank),
        )
        for rank in range(p)
    )
    return weights_in_gaps(orders, num_stages=2 * p, num_microbatches=m, limit=2 * p)


# ---- DualPipe cut in half: forwards of one chunk paired with backwards of the other --------------
#
# See arXiv 2412.19437, section 3.2.1.


def dualpipe_v(p: int, v: int, m: int) -> Orders:
    """Return DualPipeV: two chunks in a V, a forward of one paired with a backward of the other.

    DualPipe feeds microbatches from both ends into two copies of the model. Cut in half, its
    mirrored half becomes the way back up the V. Weight gradients are deferred only among the last
    backwards, where they fill gaps. Everywhere else W follows its B at once and is a part of the
    paper's full backward.

    For m >= 2p a rank holds 2p+1 activations of a chunk each. The paper runs the forward and the
    backward of a pair at the same time, to hide the messages of expert parallelism. Here one
    follows the other, and each rank's bubble is (p-1)(T_F + T_B - T_W) if T_F = T_B >= T_W. For m <
    2p, which the paper leaves out, the order is that of 2p microbatches without those that do not
    exist. v is 2::

        rank 0  F0.0 F0.1 F0.2 F0.3 F0.4 F0.5 F0.6 F7.0 B7.0 W7.0 F7.1 B7.1 W7.1 F7.2 B7.2 W7.2 F7.3
        rank 1       F1.0 F1.1 F1.2 F1.3 F1.4 F6.0 F1.5 F6.1 B6.0 W6.0 F6.2 B6.1 W6.1 F6.3 F1.6 B6.2
        rank 2            F2.0 F2.1 F2.2 F5.0 F2.3 F5.1 F2.4 F5.2 B5.0 W5.0 F5.3 F2.5 B5.1 W5.1 F5.4
        rank 3                 F3.0 F4.0 F3.1 F4.1 F3.2 F4.2 F3.3 F4.3 F3.4 B4.0 W4.0 F4.4 B3.0 W3.0

        rank 0  F0.7 B7.3 W7.3 F7.4 B0.0 W0.0 B7.4 W7.4 F7.5 B0.1 W0.1 B7.5 W7.5 F7.6 B0.2 W0.2 B7.6
        rank 1  W6.2 F6.4 B1.0 W1.0 F1.7 B6.3 W6.3 F6.5 B1.1 W1.1 B6.4 W6.4 F6.6 B1.2 W1.2 B6.5 W6.5
        rank 2  B2.0 W2.0 F2.6 B5.2 W5.2 F5.5 B2.1 W2.1 F2.7 B5.3 W5.3 F5.6 B2.2 W2.2 B5.4 W5.4 F5.7
        rank 3  F3.5 B4.1 W4.1 F4.5 B3.1 W3.1 F3.6 B4.2 W4.2 F4.6 B3.2 W3.2 F3.7 B4.3 W4.3 F4.7 B3.3

        rank 0  W7.6 F7.7 B0.3 W0.3 B7.7 W7.7 B0.4 W0.4           B0.5 W0.5      B0.6 W0.6 B0.7 W0.7
        rank 1  F6.7 B1.3 W1.3 B6.6 W6.6 B1.4 W1.4 B6.7      B1.5 W6.7      B1.6 W1.5 B1.7 W1.6 W1.7
        rank 2  B2.3 W2.3 B5.5 W5.5 B2.4 W2.4 B5.6 W5.6 B2.5 B5.7      B2.6 W2.5 B2.7 W5.7 W2.6 W2.7
        rank 3  W3.3 B4.4 W4.4 B3.4 W3.4 B4.5 W4.5 B3.5 W3.5 B4.6 B3.6 B4.7 B3.7 W4.6 W3.6 W4.7 W3.7
    """
    assert v == 2
    n = max(m, 2 * p)
    return tuple(
        in_turns(
            stages_of_rank(p, v, p - left - 1, "v"),
            m,
            ("F0", 2 * left),
            ("F0 F1", p - left),
            ("B1 W F1", left),
            ("F0 B1 W F1 B0 W", n - p - left),
            ("B1 W F1 B0 W", left),
            ("B1 W B0 W", (p - left) // 2),
            ("B1 W B0", (p - left) % 2),
            ("B1 B0", (p - left) // 2),
            ("W B0", left),
            ("W", p - left),
        )
        for left in reversed(range(p))
    )
