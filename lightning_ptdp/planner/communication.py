"""Time of messages and collectives: the alpha-beta model on nodes and network cards.

Ranks are numbered tensor first, then context, data and pipeline (``world/layout.py``), and nodes
are filled in that order. The members of a group are therefore ``stride`` ranks apart, and the group
is inside one node if all of it fits. If a group spans several nodes, its members in a node share
the traffic of its collectives, and each member drives the cards next to it. A message from one rank
to the next uses one card.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_ptdp.planner.devices import Cluster, Link
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.pass_time import PassTime, waits
from lightning_ptdp.planner.shapes import LayerShape, Product
from lightning_ptdp.world.layout import ParallelLayout


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
    measured: tuple[tuple[str, int, float], ...]

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
        if all(curves):
            return sum(_between(points, nbytes) for points in curves) / len(curves)
        return None

    def all_to_all(self, nbytes: float) -> float:
        """Return the seconds in which each member sends ``nbytes`` in equal parts to all members.

        One part stays with its sender. Parts for the same node use the node's links. Parts for
        other nodes use the member's share of the cards, at the same time. (NCCL's all-to-all
        consists of a send to and a receive from each member.)
        """
        if self.size == 1:
            return 0.0
        part = nbytes / self.size
        remote = self.size - self.members
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
        axis: ``"tensor"``, ``"pipeline"``, or ``"replica_sum"``, over which gradients are summed;
            gradients of experts are summed over ``"expert_replicas"``. Of neighbours in the
            pipeline, the slowest hop counts: all ranks of a stage in one node send to another node.
    """
    return strided_link(layout.size(axis), layout.stride(axis), cluster)


def strided_link(size: int, stride: int, cluster: Cluster) -> GroupLink:
    """Return the groups of ``size`` ranks that are ``stride`` apart."""
    inside = cluster.node
    fits = size * stride <= cluster.node_size
    members = size if fits else max(1, min(size, cluster.node_size // stride))
    # All groups of a node send to other nodes at the same time.
    cards = cluster.cards * members / cluster.node_size

    def limit(cards: float) -> Link:
        if fits:
            return inside
        bandwidth = min(inside.bandwidth, cards * cluster.card.bandwidth)
        return Link(bandwidth=bandwidth, latency_s=cluster.card.latency_s)

    return GroupLink(
        size=size,
        members=members,
        link=limit(cards),
        hop=limit(min(1.0, cards)),
        card=limit(cards / members).bandwidth,
        inside=inside,
        start_s=cluster.start_s,
        measured=tuple(
            (name, nbytes, seconds)
            for name, count, nbytes, seconds in cluster.collectives
            if fits and count in (size, 0)
        ),
    )


def _between(points: Sequence[tuple[int, float]], nbytes: float) -> float:
    """Return the seconds for ``nbytes`` by linear interpolation between the measured sizes.

    Smaller messages take the seconds of the smallest size. Larger ones have the rate of the
    largest.
    """
    sizes, seconds = zip(*points, strict=True)
    return float(np.interp(nbytes, sizes, seconds)) * max(1.0, nbytes / sizes[-1])


# ---- Cost of tensor parallelism ------------------------------------------------------------------
#
# Exposed collectives, copies before and after them, and biases that are added after a sum.


def tensor_collectives(
    job: Job, choice: Choice, products: Sequence[Product], times: Sequence[PassTime]
) -> tuple[PassTime, int]:
    """Return the waiting time of both passes, and the number of collectives per forward.

    Without sequence parallelism, each half of the layer has an all-reduce in each direction. If the
    software supports it, the backward's all-reduce runs at the same time as the product of the
    weight gradient. With sequence parallelism, the all-reduce becomes an all-gather and a
    reduce-scatter. The backward gathers the gradient first. The input's gather and the
    reduce-scatter run at the same time as products (``tensor_parallel/parallel_product.py``).
    """
    group = group_link(choice.layout, job.cluster, "tensor")
    hides = job.software.hides_tensor and job.overlaps
    forward = backward = 0.0
    count = 0
    for product, time in zip(products, times, strict=True):
        nbytes = _shared_bytes(job, choice, product)
        if group.size == 1 or not nbytes:
            continue
        enters = product.cut == "outputs"
        sequence = choice.layout.sequence_parallel and not product.full_sequence
        seconds = group.all_gather(nbytes) if sequence else group.all_reduce(nbytes)
        if enters:
            passes = [time.weight, *([time.backward - time.weight] if sequence else [])]
            backward += sum(max(0.0, seconds - hiding) if hides else seconds for hiding in passes)
        elif sequence:
            backward += seconds
        if sequence or not enters:
            forward += seconds
            count += 1
    return waits(forward, backward), count


def expert_collectives(job: Job, choice: Choice, layer: LayerShape) -> tuple[float, int]:
    """Return the waiting time of one pass of a layer's experts, and its number of collectives.

    Each tensor-parallel rank has the full sequence, sends a part of the tokens to the experts and
    gathers the results. If each expert is split, each rank sends all tokens, and the results are
    summed (``tensor_parallel/kinds/sharded_experts.py``).
    """
    group = group_link(choice.layout, job.cluster, "tensor")
    if layer.experts is None or group.size == 1:
        return 0.0, 0
    nbytes = choice.samples * layer.products[0].rows * layer.experts.hidden * job.precision.compute
    unsplit = choice.layout.expert_tensor_parallel_size == 1
    seconds = group.all_gather(nbytes) if unsplit else group.all_reduce(nbytes)
    if not choice.layout.sequence_parallel:
        return seconds, 1
    return seconds + group.all_gather(nbytes), 2


def transposes(job: Job, choice: Choice, products: Iterable[Product]) -> PassTime:
    """Return the time of a layer's passes to transpose the sequence for collectives.

    Collectives concatenate along the first dimension. Our sequence dimension is the second one, so
    it is moved to the front and back. This is a copy if there are several samples.
    """
    forward = backward = 0.0
    if not (
        choice.layout.sequence_parallel and job.software.batch_first and choice.micro_batch_size > 1
    ):
        return PassTime()
    for product in products:
        seconds = 2 * _shared_bytes(job, choice, product) / job.device.stream
        forward += seconds
        backward += 2 * seconds if product.cut == "outputs" else seconds
    return PassTime(forward=forward, backward=backward)


def late_biases(job: Job, choice: Choice, products: Iterable[Product]) -> float:
    """Return the bytes of the biases that are added after the sums over ranks.

    The products cannot include these biases.
    """
    t = choice.t
    if t == 1 or job.software.elementwise != "eager":
        return 0.0
    added = sum(
        _shared_bytes(job, choice, product)
        for product in products
        if product.cut == "inputs" and product.bias
    )
    return 2 * added / (t if choice.layout.sequence_parallel else 1)


def _shared_bytes(job: Job, choice: Choice, product: Product) -> float:
    """Return the bytes that tensor-parallel ranks gather or sum around a product.

    They are the input of the first of several column layers, or the output of a row layer.
    """
    channels = {"outputs": product.inputs * product.enters, "inputs": product.outputs}
    rows = choice.samples * product.rows
    return rows * channels.get(product.cut, 0) * job.precision.compute
