"""1F1B, plain and interleaved, and schedules that fill and drain the pipeline."""

from __future__ import annotations

from lightning_ptdp.schedule.generators.orders import Orders, groups, in_groups, in_turns
from lightning_ptdp.world.axes import StagePlacement, stages_of_rank


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
# In the timelines of this folder every action takes one column. ``simulate(...).text()`` draws them.


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
