"""Links and collectives on nodes and network cards."""

import dataclasses

import pytest

from lightning_ptdp.planner import Link, find_device
from lightning_ptdp.planner.communication import group_link
from lightning_ptdp.world.layout import ParallelLayout

pytestmark = pytest.mark.pure

CLUSTER = find_device("h100").cluster
CARD = CLUSTER.card.bandwidth


def test_group_link_depends_on_placement_on_nodes():
    # d = 8
    layout = ParallelLayout(world_size=64, tensor_parallel_size=4, pipeline_parallel_size=2)
    assert group_link(layout, CLUSTER, "tensor").link == CLUSTER.node
    # Two of a node's eight ranks are in one data group, so each group drives two cards.
    assert group_link(layout, CLUSTER, "replica_sum").link.bandwidth == 2 * CARD
    assert group_link(layout, CLUSTER, "pipeline").hop == CLUSTER.card
    one_node = ParallelLayout(world_size=8, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert {
        group_link(one_node, CLUSTER, "tensor").link,
        group_link(one_node, CLUSTER, "replica_sum").link,
        group_link(one_node, CLUSTER, "pipeline").hop,
    } == {CLUSTER.node}
    wide = group_link(ParallelLayout(world_size=16, tensor_parallel_size=16), CLUSTER, "tensor")
    assert wide.link.latency_s == CLUSTER.card.latency_s


def test_ring_hop_between_nodes_uses_one_card():
    """Collectives of a group that fills its nodes use all cards. Keys and values are sent from one
    rank to the next."""
    ring = group_link(ParallelLayout(world_size=16, context_parallel_size=16), CLUSTER, "context")
    assert ring.link.bandwidth == pytest.approx(min(CLUSTER.node.bandwidth, 8 * CARD))
    assert ring.hop.bandwidth == CARD


def test_ranks_share_network_cards():
    four = dataclasses.replace(CLUSTER, cards=4)
    layout = ParallelLayout(world_size=64, tensor_parallel_size=8, pipeline_parallel_size=2)
    assert group_link(layout, four, "data").link.bandwidth == CARD / 2
    assert group_link(layout, four, "pipeline").hop.bandwidth == CARD / 2
    slow = dataclasses.replace(CLUSTER, card=Link(bandwidth=CARD / 3, latency_s=1e-4))
    assert group_link(layout, slow, "pipeline").hop == slow.card


def test_time_of_ring_and_tree_collectives():
    cluster = dataclasses.replace(find_device("a100").cluster, start_s=0.0)
    inside = group_link(ParallelLayout(world_size=8, tensor_parallel_size=8), cluster, "tensor")
    rate, latency = cluster.node.bandwidth, cluster.node.latency_s
    assert inside.all_gather(8e9) == pytest.approx(7 * latency + 7e9 / rate)
    assert inside.all_reduce(8e9) == pytest.approx(14 * latency + 14e9 / rate)
    # Over 64 nodes an all-reduce traverses a tree of six levels twice. An all-gather passes
    # every node.
    wide = group_link(ParallelLayout(world_size=512, tensor_parallel_size=8), cluster, "data")
    assert wide.all_reduce(0.0) == pytest.approx(12 * cluster.card.latency_s)
    assert wide.all_gather(0.0) == pytest.approx(63 * cluster.card.latency_s)


def test_expert_all_to_all_uses_links_in_and_between_nodes():
    """Expected times are computed from the bytes between each pair of ranks, by link."""
    layout = ParallelLayout(
        world_size=32, tensor_parallel_size=2, context_parallel_size=2, expert_parallel_size=8
    )
    group = group_link(layout, CLUSTER, "expert")
    ranks = layout.group_of("expert", 0)
    assert ranks == tuple(range(0, 16, 2)) and layout.stride("expert") == 2
    nodes = [rank // CLUSTER.node_size for rank in ranks]
    assert (group.size, group.members) == (8, nodes.count(0)) == (8, 4)
    sent, part = 8e9, 1e9
    near, far = part * (nodes.count(0) - 1), part * nodes.count(1)
    assert near + far == sent * 7 / 8
    seconds = max(near / CLUSTER.node.bandwidth, far / CARD)  # eight ranks of a node, eight cards
    assert group.all_to_all(sent) == pytest.approx(
        CLUSTER.start_s + CLUSTER.card.latency_s + seconds
    )
    few = group_link(layout, dataclasses.replace(CLUSTER, cards=2), "expert")
    assert few.all_to_all(sent) == pytest.approx(
        CLUSTER.start_s + CLUSTER.card.latency_s + far / (CARD / 4)
    )
    # Ranks with the same experts: one per block.
    others = group_link(layout, CLUSTER, "expert_replicas")
    assert (
        layout.group_of("expert_replicas", 0) == (0, 16) and layout.stride("expert_replicas") == 16
    )
    assert (others.size, others.members) == (2, 1)
    inside = group_link(ParallelLayout(world_size=32, expert_parallel_size=8), CLUSTER, "expert")
    assert inside.all_to_all(sent) == pytest.approx(
        CLUSTER.start_s + CLUSTER.node.latency_s + 7e9 / CLUSTER.node.bandwidth
    )
    assert group_link(ParallelLayout(world_size=32), CLUSTER, "expert").all_to_all(sent) == 0.0
