"""Communicators of a rank, and the contract with NCCL under which the mesh creates them.

- **Device.** Since torch 2.15 "nccl" (nccl2) binds the default group to a device when it is
  created, and guesses the device from ``LOCAL_RANK`` or the rank. It is therefore given.
- **Creation.** torch splits a new group from a bound default group, which needs all ranks at once.
  ``lazy_init`` prevents that: the members create the communicator at its first use. Before torch
  2.15 there is no ``lazy_init``, and no device is bound.
- **First use.** The first collective of a group, and the first message between two ranks, block the
  *host* until every peer makes the same call. Inside a step no rank may wait like that: it would
  wait for a gradient whose activation it has not sent yet. Therefore every group and channel is
  used once before it is returned.
- **Order.** Every rank takes part only in creating the groups that it belongs to, so the cost does
  not grow with the world. torch names such a group by its ranks and by *the number of groups that
  each of them has created before*. Therefore all ranks must create the same number of groups, in
  the same order. If only some ranks need a group, the other ranks create one among themselves.
- **Sharing.** Groups with equal ranks share a communicator, which runs its operations in the order
  of issue. There are three exceptions. An urgent group does not share a communicator with
  reductions, because it would have to wait for their large buckets. The default group has its own
  communicator, because the user may call it while a reduction runs. The groups of a two-level
  reduction have their own, because a thread issues their second collective.
- **Thread blocks.** An operation starts when all its thread blocks fit on the GPU, one per SM. A
  receive that was posted early holds them until its message is sent. Channels therefore get few
  blocks, which leaves room for the collectives of a computation.
- **Time.** A group's time limit is longer than that of the hang guard, which names the rank and
  exits with code 1.
"""

from __future__ import annotations

from lightning_ptdp.world.axes import SETS
from lightning_ptdp.world.layout import ParallelLayout

CHANNEL = "channel"
CHANNEL_CTAS = 4
"""Thread blocks of a message. A rank has up to 8 channels (4 if the stages are in a loop).

They hold 32 of the 132 SMs of an H100. NCCL's own choice of up to 32 blocks would need 256.
"""
URGENT = frozenset({"tensor", "context", "expert", CHANNEL})
"""Groups whose communication the next computation waits for.

A GPU runs it before computation that is already queued. Reductions are not urgent.
"""
_REDUCES_TOO = frozenset({"context", "expert"})
"""Urgent groups whose ranks also take part in reductions."""


def group_names(layout: ParallelLayout) -> tuple[str, ...]:
    """Return the names of a rank's groups, in the order of their creation."""
    axes = (row.name for row in layout.axes)
    replica_axes = (row.others for row in layout.blocked)
    return *axes, *SETS, *replica_axes


def shared_name(name: str) -> str:
    """Return a name that is the same for groups which share the communicator of their ranks."""
    return name if name in _REDUCES_TOO else ""


def communicators(layout: ParallelLayout, rank: int) -> list[tuple[int, ...]]:
    """Return the members of each communicator that ``rank`` has, the default group's first."""
    groups = {("default", tuple(range(layout.world_size)))}
    for name in group_names(layout):
        ranks = layout.group_of(name, rank)
        groups.add((shared_name(name), ranks))
    stages = layout.group_of("pipeline", rank)
    channels = [
        (stages[source], stages[target])
        for pairs in channel_rounds(layout)
        for source, target, _ in pairs
        if rank in (stages[source], stages[target])
    ]
    group_ranks = [ranks for _, ranks in groups if len(ranks) > 1]
    return [*sorted(group_ranks, key=len, reverse=True), *channels]


def channel_rounds(layout: ParallelLayout) -> list[list[tuple[int, int, str]]]:
    """Return rounds of the channels between pipeline ranks, with no rank twice in a round.

    A channel is (source, destination, direction).
    """
    ends = [
        (layout.rank_of_stage(stage), layout.rank_of_stage(stage + 1))
        for stage in range(layout.num_stages - 1)
    ]
    forward = [(source, target, "forward") for source, target in ends if source != target]
    backward = [(target, source, "backward") for source, target, _ in forward]
    rounds: list[list[tuple[int, int, str]]] = []
    for channel in dict.fromkeys([*forward, *backward]):
        free_round = next(
            (pairs for pairs in rounds if all(not {*channel[:2]} & {*pair[:2]} for pair in pairs)),
            None,
        )
        if free_round is None:
            free_round = []
            rounds.append(free_round)
        free_round.append(channel)
    return rounds
