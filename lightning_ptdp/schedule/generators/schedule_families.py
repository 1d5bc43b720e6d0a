"""The schedules of the package by name: order, allowed stages, and costs in closed form.

Building schedules for hundreds of layouts would take too long. The tests compare the formulas with
the simulator. A unit is one rank's forward of one microbatch through all of its stages, and its
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from lightning_ptdp.base.option_types import check_types
from lightning_ptdp.schedule.actions import Action
from lightning_ptdp.schedule.generators.compute_orders import (
    dualpipe_v,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from lightning_ptdp.world.axes import StagePlacement

# ---- User-defined schedules ----------------------------------------------------------------------


@dataclass(frozen=True)
class CustomSchedule:
    """A named compute order, accepted everywhere in place of the name of a schedule.

    For example::

        def order(p, v, m):  # all forwards, then all backwards
            kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
            return [[Action(kind, rank, i) for kind in kinds for i in range(m)] for rank in
            range(p)]

        strategy = PTDPStrategy(pipeline_parallel_size=4, schedule=CustomSchedule("mine", order))

    Communication and gradient reductions are added, and the result is proven, as for the schedules
    of the package.

    Attributes:
        name: Name for logs and plots.
        order: Function from (p, v, m) to the compute order of each rank: forward, backward and, if
            the backward is split, weight actions, for every microbatch on every stage of the rank.
            It is called for each m that occurs (a last batch may be shorter). It must be hashable,
            which functions are, and must return the same on every rank. If processes are started
            with it, it must be a module-level function.
        placement: Placement of the stages on the ranks.

    Raises:
        ValueError: The name is empty, the order cannot be called, or the placement is unknown.
    """

    name: str
    order: Callable[[int, int, int], Sequence[Sequence[Action]]]
    placement: StagePlacement = "loop"

    def __post_init__(self) -> None:
        check_types(self)
        if not self.name:
            raise ValueError(f"name={self.name!r} must be a word, because logs and plots use it")


@dataclass(frozen=True, kw_only=True)
class ScheduleFamily(CustomSchedule):
    """A schedule of the package before its sizes are known, with its costs in closed form.

    Attributes:
        chunks: Number of stages per rank that it can use; two if they are placed in a V.
        otherwise: Schedule to use instead if the stages do not fit.
        splits_backward: Whether weight gradients are actions of their own.
        least: p -> smallest number of microbatches for which the formulas hold; with fewer the
            schedule has no advantage over 1F1B.
        held: (p, v, m, rank) -> maximum number of activations (a microbatch in one stage) that the
            rank holds; an upper bound.
        bubble: (p, v, F, B, W) -> idle seconds of a rank in a step. F, B and W are the times of the
            rank's full forward, of its full backward, and of the weight gradients in that
            backward.
        waits: (p, v, m) -> number of messages that the step waits for.
    """

    chunks: Literal["any", "one", "several"] = "any"
    otherwise: str = ""
    splits_backward: bool = False
    least: Callable[[int], int] = lambda p: 1
    held: Callable[[int, int, int, int], int]
    bubble: Callable[[int, int, float, float, float], float]
    waits: Callable[[int, int, int], float]


def _waits_1f1b(p: int, v: int, m: int) -> float:
    # A rank's forward and backward alternate, so that most microbatches wait for a message in each
    # direction.
    return 2 * ((p - 1) * -(-m // p) + p - 2)


def _bubble_1f1b(p: int, v: int, forward: float, backward: float, weight: float) -> float:
    return (p - 1) * (forward + backward) / v


def _held_interleaved(p: int, v: int, m: int, rank: int) -> int:
    # Microbatches visit a chunk in groups of p; the remainder makes one group larger.
    return min(v * m, (p + m % p) * (v - 1) + 2 * (p - rank - 1) + 1)


def _bubble_dualpipe_v(p: int, v: int, forward: float, backward: float, weight: float) -> float:
    # The paper's (p - 1) (T_F + T_B - T_W) of a chunk, plus the excess of backwards that are longer
    # than the forwards that they are paired with.
    excess = (p - 1) * (backward - weight - forward) - forward
    return ((p - 1) * max(0.0, forward + backward - 2 * weight) + max(0.0, excess)) / 2


INTERLEAVED = "interleaved_1f1b"
FAMILIES: Mapping[str, ScheduleFamily] = MappingProxyType(
    {
        family.name: family
        for family in (
            ScheduleFamily(
                name="gpipe",
                order=gpipe,
                # arXiv 2104.04473, section 2.2.1
                held=lambda p, v, m, rank: v * m,
                bubble=_bubble_1f1b,
                waits=lambda p, v, m: 2 * (p * v - 1),
            ),
            ScheduleFamily(
                name="1f1b",
                order=one_f_one_b,
                chunks="one",
                otherwise=INTERLEAVED,
                # arXiv 2104.04473, section 2.2.1
                held=lambda p, v, m, rank: min(m, p - rank),
                bubble=_bubble_1f1b,
                waits=_waits_1f1b,
            ),
            ScheduleFamily(
                name=INTERLEAVED,
                order=interleaved_one_f_one_b,
                chunks="several",
                otherwise="1f1b",
                # arXiv 2104.04473, section 2.2.2
                least=lambda p: p,
                held=_held_interleaved,
                bubble=_bubble_1f1b,
                waits=lambda p, v, m: 2 * (p * v - 1),
            ),
            ScheduleFamily(
                name="zb_h1",
                order=zb_h1,
                chunks="one",
                otherwise="zb_v",
                splits_backward=True,
                # arXiv 2401.10241, section 3
                least=lambda p: p,
                held=lambda p, v, m, rank: min(m, p),
                bubble=lambda p, v, forward, backward, weight: (
                    (p - 1) * max(0.0, forward + backward - 2 * weight)
                ),
                waits=lambda p, v, m: 4 * (p - 1),
            ),
            ScheduleFamily(
                name="zb_v",
                order=zb_v,
                placement="v",
                otherwise="zb_h1",
                splits_backward=True,
                # arXiv 2401.10241, section 6
                least=lambda p: 2 * p,
                held=lambda p, v, m, rank: min(2 * m, 2 * p),
                bubble=lambda p, v, forward, backward, weight: (
                    (p - 1) * max(forward, backward - weight) / 2
                ),
                waits=lambda p, v, m: 6 * (p - 1),
            ),
            ScheduleFamily(
                name="dualpipe_v",
                order=dualpipe_v,
                placement="v",
                otherwise="1f1b",
                splits_backward=True,
                # arXiv 2412.19437, section 3.2.1
                least=lambda p: 2 * p,
                held=lambda p, v, m, rank: min(2 * m, 2 * p + 1),
                bubble=_bubble_dualpipe_v,
                waits=lambda p, v, m: 6 * (p - 1),
            ),
        )
    }
)
"""Schedules by name, in the order in which messages list them."""
