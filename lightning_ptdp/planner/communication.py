"""Time of messages and collectives between the ranks of a layout: the alpha-beta model on nodes and
network cards.

Ranks are numbered tensor first, then context, data, pipeline (layout.py), and nodes are filled in
that order; so a group's members are ``stride`` ranks apart, and it stays inside a node if all of it
fits. Of a group that does not, the members in a node share out the traffic of its collectives, each
driving the cards next to it; but what one rank sends to the next goes over one card."""

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
    """A group of ranks, and what limits it.

    Attributes:
        size: Members.
        members: Of them, those of one node.
        link: What limits collectives: the node's links, or the cards that a node's members drive
            together.
        hop: From a member to the next, the slowest: the node's link, or one card.
        card: A member's part of its node's cards, in bytes a second, while all send.
        inside: The node's links.
        start_s: What a collective takes before its first step.
        measured: (operation, bytes, seconds) of a group of this size, in place of all that.
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
        """Seconds to gather a tensor of ``nbytes`` in all, or to reduce-scatter it: round a ring,
        1/size of it at each member."""
        if (found := self._found(("all-gather", "reduce-scatter"), nbytes)) is not None:
            return found
        return self._collective(nbytes * (self.size - 1) / self.size, self._around)

    def all_reduce(self, nbytes: float) -> float:
        """Seconds to sum a tensor of ``nbytes``: a reduce-scatter and an all-gather round a ring,
        or up and down a tree of nodes."""
        if (found := self._found(("all-reduce",), nbytes)) is not None:
            return found
        levels = math.ceil(math.log2(max(1, self.size // self.members)))
        tree = levels * self.link.latency_s + (self.members - 1) * self.inside.latency_s
        return self._collective(
            2 * nbytes * (self.size - 1) / self.size, 2 * min(self._around, tree)
        )

    def send(self, nbytes: float) -> float:
        """Seconds of one message from a member to the next."""
        if self.size == 1:
            return 0.0
        found = self._found(("send",), nbytes)
        return self.hop.latency_s + nbytes / self.hop.bandwidth if found is None else found

    def _found(self, operations: Sequence[str], nbytes: float) -> float | None:
        """Seconds by what was measured, the mean of the operations; None if they were not."""
        every = [
            sorted((size, seconds) for name, size, seconds in self.measured if name == operation)
            for operation in operations
        ]
        return (
            sum(_between(points, nbytes) for points in every) / len(every) if all(every) else None
        )

    def all_to_all(self, nbytes: float) -> float:
        """Seconds in which each member sends ``nbytes`` in equal parts to all, one of which stays:
        to those of its node over the node's links, to the others over its part of the cards, both
        at once (NCCL's all-to-all is a send to, and a receive from, each)."""
        if self.size == 1:
            return 0.0
        part, others = nbytes / self.size, self.size - self.members
        sent = max(part * (self.members - 1) / self.inside.bandwidth, part * others / self.card)
        return self.start_s + self.hop.latency_s + sent

    @property
    def _around(self) -> float:
        nodes = self.size // self.members
        crossing = nodes - 1 if nodes > 1 else 0
        return crossing * self.link.latency_s + (self.size - 1 - crossing) * self.inside.latency_s

    def _collective(self, sent: float, latency: float) -> float:
        return self.start_s + latency + sent / self.link.bandwidth if self.size > 1 else 0.0


def group_link(layout: ParallelLayout, cluster: Cluster, axis: str) -> GroupLink:
    """The groups of an axis, or of several that are neighbours in the order of ranks (``SETS``).

    Args:
        layout: Of the ranks.
        cluster: What joins them.
        axis: ``"tensor"``, or ``"replica_sum"``, over which gradients are summed; those of experts
            over ``"expert_replicas"``.
    """
    return strided_link(layout.size(axis), layout.stride(axis), cluster)


def strided_link(size: int, stride: int, cluster: Cluster) -> GroupLink:
    """Groups of ``size`` ranks that are ``stride`` apart."""
    inside, between = cluster.node, cluster.between
    if size * stride <= cluster.node_size:
        found = tuple(
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
            measured=found,
        )
    members = max(1, min(size, cluster.node_size // stride))
    # All groups of a node cross at once.
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
    """Neighbours in the pipeline; the slowest hop counts, where all ranks of a stage that are in
    one node send to another."""
    return strided_link(
        layout.pipeline_parallel_size, layout.world_size // layout.pipeline_parallel_size, cluster
    )


def _between(points: Sequence[tuple[int, float]], nbytes: float) -> float:
    """Straight lines between the measured sizes; the smallest's seconds below it, the largest's
    rate above it."""
    if nbytes <= points[0][0]:
        return points[0][1]
    if nbytes >= points[-1][0]:
        return points[-1][1] * nbytes / points[-1][0]
    (low, start), (high, end) = next(
        pair for pair in itertools.pairwise(points) if nbytes <= pair[1][0]
    )
    return start + (end - start) * (nbytes - low) / (high - low)
