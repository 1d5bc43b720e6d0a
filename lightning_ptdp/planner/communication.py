"""Time of messages and collectives: the alpha-beta model on nodes and network cards.

Ranks are numbered tensor first, then context, data and pipeline (``world/layout.py``), and nodes
are filled in that order. The members of a group are therefore ``stride`` ranks apart, and the group
is inside one node if all of it fits. If a group spans several nodes, its members in a node share
the traffic of its collectives, and each member drives the cards next to it. A message from one rank
to the next uses one card.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ptdp.planner.devices import Cluster, Link
from lightning_ptdp.world.layout import ParallelLayout

__all__ = ["GroupLink", "group_link", "pipeline_link", "strided_link"]


@dataclass(frozen=True, kw_only=True)
class GroupLink:
    """A group of ranks and the links that limit it.

    Attributes:
        size: Number of members.
        members: Number of members in one node.
        link: Limit of collectives: the node's links, or all cards that the members of a node drive
            together.
        hop: Slowest link from a member to the next: the node's link, or one card.
        card: A member's share of its node's cards in bytes/s, while all members send.
        inside: The node's links.
        start_s: Seconds of a collective before its first step.
        measured: (operation, bytes, seconds) of a group of this size, which replace the estimates.
    """

    size: int
    members: int
    link: Link
    hop: Link
    card: float
    inside: Link
    start_s: float
    measured: tuple[tuple[str, int, float], ...] = ()

    def all_gather(self, nbytes: float) -> float:
        """Return the seconds to gather or reduce-scatter a tensor of ``nbytes`` in total.

        The data travel round a ring, and each member holds 1/size of them.
        """
        if (measured := self._found(("all-gather", "reduce-scatter"), nbytes)) is not None:
            return measured
        return self._collective(nbytes * (self.size - 1) / self.size, self._around)

    def all_reduce(self, nbytes: float) -> float:
        """Return the seconds to sum a tensor of ``nbytes``.

        The sum is a reduce-scatter and an all-gather round a ring, or it goes up and down a tree of
        nodes.
        """
        if (measured := self._found(("all-reduce",), nbytes)) is not None:
            return measured
        levels = math.ceil(math.log2(max(1, self.size // self.members)))
        tree = levels * self.link.latency_s + (self.members - 1) * self.inside.latency_s
        return self._collective(
            2 * nbytes * (self.size - 1) / self.size, 2 * min(self._around, tree)
        )

    def send(self, nbytes: float) -> float:
        """Return the seconds of one message from a member to the next."""
        if self.size == 1:
            return 0.0
        measured = self._found(("send",), nbytes)
        return self.hop.latency_s + nbytes / self.hop.bandwidth if measured is None else measured

    def _found(self, operations: Sequence[str], nbytes: float) -> float | None:
        """Return the seconds by measurement, as the mean of the operations, or None."""
        curves = [
            sorted((size, seconds) for name, size, seconds in self.measured if name == operation)
            for operation in operations
        ]
        return (
            sum(_between(points, nbytes) for points in curves) / len(curves)
            if all(curves)
            else None
        )

    def all_to_all(self, nbytes: float) -> float:
        """Return the seconds in which each member sends ``nbytes`` in equal parts to all members.

        One part stays with its sender. Parts for the same node use the node's links. Parts for
        other nodes use the member's share of the cards, at the same time. (NCCL's all-to-all
        consists of a send to and a receive from each member.)
        """
        if self.size == 1:
            return 0.0
        part, remote = nbytes / self.size, self.size - self.members
        sent = max(part * (self.members - 1) / self.inside.bandwidth, part * remote / self.card)
        return self.start_s + self.hop.latency_s + sent

    @property
    def _around(self) -> float:
        nodes = self.size // self.members
        crossing = nodes - 1 if nodes > 1 else 0
        return crossing * self.link.latency_s + (self.size - 1 - crossing) * self.inside.latency_s

    def _collective(self, sent: float, latency: float) -> float:
        return self.start_s + latency + sent / self.link.bandwidth if self.size > 1 else 0.0


def group_link(layout: ParallelLayout, cluster: Cluster, axis: str) -> GroupLink:
    """Return the groups of an axis, or of several neighbouring axes (``SETS``).

    Args:
        layout: Layout of the ranks.
        cluster: Links between the ranks.
        axis: ``"tensor"``, or ``"replica_sum"``, over which gradients are summed; gradients of
            experts are summed over ``"expert_replicas"``.
    """
    return strided_link(layout.size(axis), layout.stride(axis), cluster)


def strided_link(size: int, stride: int, cluster: Cluster) -> GroupLink:
    """Return the groups of ``size`` ranks that are ``stride`` apart."""
    inside, between = cluster.node, cluster.between
    if size * stride <= cluster.node_size:
        measured = tuple(
            (name, nbytes, seconds)
            for name, count, nbytes, seconds in cluster.collectives
            if count in (size, 0)
        )
        return GroupLink(
            size=size,
            members=size,
            link=inside,
            hop=inside,
            card=inside.bandwidth,
            inside=inside,
            start_s=cluster.start_s,
            measured=measured,
        )
    members = max(1, min(size, cluster.node_size // stride))
    # All groups of a node send to other nodes at the same time.
    cards = cluster.cards * members / cluster.node_size
    return GroupLink(
        size=size,
        members=members,
        link=Link(
            bandwidth=min(inside.bandwidth, cards * between.bandwidth), latency_s=between.latency_s
        ),
        hop=Link(
            bandwidth=min(inside.bandwidth, min(1.0, cards) * between.bandwidth),
            latency_s=between.latency_s,
        ),
        card=min(inside.bandwidth, cards / members * between.bandwidth),
        inside=inside,
        start_s=cluster.start_s,
    )


def pipeline_link(layout: ParallelLayout, cluster: Cluster) -> GroupLink:
    """Return the groups of neighbours in the pipeline.

    The slowest hop counts: all ranks of a stage in one node send to another node.
    """
    return strided_link(
        layout.pipeline_parallel_size, layout.world_size // layout.pipeline_parallel_size, cluster
    )


def _between(points: Sequence[tuple[int, float]], nbytes: float) -> float:
    """Return the seconds for ``nbytes`` by linear interpolation between the measured sizes.

    Smaller messages take the seconds of the smallest size. Larger ones have the rate of the
    largest.
    """
    if nbytes <= points[0][0]:
        return points[0][1]
    if nbytes >= points[-1][0]:
        return points[-1][1] * nbytes / points[-1][0]
    (low, start), (high, end) = next(
        pair for pair in itertools.pairwise(points) if nbytes <= pair[1][0]
    )
    return start + (end - start) * (nbytes - low) / (high - low)
