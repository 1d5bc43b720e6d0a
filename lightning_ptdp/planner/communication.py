"""How long messages and collectives take between the ranks of a layout: the alpha-beta model with ring algorithms.

Ranks are numbered tensor first, then context, data, pipeline (layout.py), and nodes are filled in that order; so a group's members are
``stride`` ranks apart, and it stays inside a node if all of it fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ptdp.planner.devices import Device, Link
from lightning_ptdp.world.layout import ParallelLayout

__all__ = ["GroupLink", "group_link", "pipeline_link"]


@dataclass(frozen=True, kw_only=True)
class GroupLink:
    """A group of ranks and the link that limits it."""

    size: int
    link: Link

    def all_gather(self, nbytes: float) -> float:
        """Seconds to gather a tensor of ``nbytes`` in all, or to reduce-scatter it: (size - 1) steps of 1/size of it."""
        steps = self.size - 1
        return steps * (self.link.latency_s + nbytes / self.size / self.link.bandwidth)

    def all_reduce(self, nbytes: float) -> float:
        """Seconds to sum a tensor of ``nbytes``: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather(nbytes)

    def send(self, nbytes: float) -> float:
        """Seconds of one message from a member to the next."""
        return self.link.latency_s + nbytes / self.link.bandwidth if self.size > 1 else 0.0


def group_link(layout: ParallelLayout, device: Device, axis: str) -> GroupLink:
    """The groups of an axis, or of several that are neighbours in the order of ranks (``SETS``).

    Args:
        layout: Of the ranks.
        device: Of each.
        axis: ``"tensor"``, or ``"replica_sum"``, over which gradients are summed.
    """
    size, stride = layout.size(axis), layout.stride(axis)
    if size * stride <= device.node_size:
        return GroupLink(size=size, link=device.inside)
    # The members that a node has share out the traffic between nodes: each drives its own network card.
    members = max(1, min(size, device.node_size // stride))
    bandwidth = min(device.inside.bandwidth, members * device.between.bandwidth)
    return GroupLink(size=size, link=Link(bandwidth=bandwidth, latency_s=device.between.latency_s))


def pipeline_link(layout: ParallelLayout, device: Device) -> GroupLink:
    """Neighbours in the pipeline; the slowest hop counts."""
    inside = layout.world_size <= device.node_size
    return GroupLink(size=layout.pipeline_parallel_size, link=device.inside if inside else device.between)
