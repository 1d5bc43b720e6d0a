"""Context parallelism in the planner: communication, memory and the layout search."""

import dataclasses

import pytest

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.models import GPTConfig
from lightning_ptdp.planner import Choice, Job, Space, find_device, search, step_time
from lightning_ptdp.planner.communication import group_link
from lightning_ptdp.planner.memory import layer_activations
from lightning_ptdp.planner.sublayer_cost import exchange_time
from lightning_ptdp.world.layout import ParallelLayout
from tests.planner.jobs import small_job

pytestmark = pytest.mark.pure

MODEL = GPTConfig.llama(
    sequence_length=32768,
    num_layers=4,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    vocabulary_size=32000,
)
EXCHANGES = ("ring", "all_to_all")
PAIRS = 32768 * 8 * 128 * 2
"""Elements of the keys and values of a rank in a layout of ``cut``."""


def cut(c, exchange="ring", *, b=8, world_size=8):
    """Return a layout with the same number of tokens on each rank for every c."""
    layout = ParallelLayout(world_size=world_size, context_parallel_size=c)
    return Choice(
        layout=layout,
        micro_batch_size=b * c // 8,
        num_microbatches=1,
        context_parallel_attention=exchange,
    )


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_step_time_grows_with_context_parallel_size(exchange):
    """The number of operations per rank is the same for every c."""
    job = small_job(MODEL, world_size=8)
    times = [step_time(job, cut(c, exchange)).total for c in (1, 2, 4, 8)]
    assert times == sorted(times) and times[1] > times[0]


def test_ring_transfer_times_on_slow_link():
    """Check the transfer times of the ring on a link too slow to be hidden by attention.

    Keys and values are sent c - 1 times in the forward and in the backward pass. The backward pass
    also sends their fp32 gradients c - 1 times."""
    job = small_job(MODEL, world_size=8)
    slow = dataclasses.replace(job.cluster.node, bandwidth=1e6, latency_s=0.0)
    cluster = dataclasses.replace(job.cluster, node=slow, start_s=0.0)
    job = dataclasses.replace(job, device=dataclasses.replace(job.device, cluster=cluster))
    attention = job.shape.layers[0].attentions[0]
    for c in (2, 4, 8):
        there, back = exchange_time(job, cut(c), attention, 1e-3, 2.5e-3)
        assert there == pytest.approx((c - 1) * PAIRS * 2 / 1e6, rel=1e-3)
        assert back == pytest.approx((c - 1) * PAIRS * (2 + 4) / 1e6, rel=1e-3)


def test_last_gradient_hop_of_ring_is_not_overlapped():
    job = small_job(MODEL, world_size=8)
    job = dataclasses.replace(job, device=dataclasses.replace(job.device, memory_bandwidth=1e30))
    attention, link = (
        job.shape.layers[0].attentions[0],
        group_link(cut(4).layout, job.cluster, "context"),
    )
    there, back = exchange_time(job, cut(4), attention, 10.0, 25.0)
    assert (there, back) == (pytest.approx(0.0), pytest.approx(link.start_s + link.send(4 * PAIRS)))
    # Attention that takes no time hides no hop.
    assert exchange_time(job, cut(4), attention, 0.0, 0.0)[0] == pytest.approx(
        3 * (link.start_s + link.send(2 * PAIRS))
    )


def test_all_to_all_copies_kv_heads_if_ranks_exceed_heads():
    """With eight key/value heads on sixteen ranks, each head is sent and kept twice."""
    job = small_job(MODEL, world_size=16, batch=16)
    ring, traded = (
        layer_activations(job, cut(16, exchange, world_size=16)).kept for exchange in EXCHANGES
    )
    assert traded - ring == pytest.approx(2 * PAIRS)


def test_search_tie_prefers_smaller_context_parallel_size():
    """Check that c = 1 ranks first on a device with free communication and memory accesses.

    All context-parallel sizes then take about the same time.
    """
    device = find_device("h100")
    free = dataclasses.replace(device.cluster.node, bandwidth=1e30, latency_s=0.0)
    cluster = dataclasses.replace(device.cluster, node=free, card=free, start_s=0.0)
    device = dataclasses.replace(
        device, memory_bandwidth=1e30, cache_bandwidth=1e30, cluster=cluster
    )
    job = Job(model=MODEL, world_size=8, global_batch_size=8, device=device)
    job = dataclasses.replace(job, software=dataclasses.replace(job.software, operation_s=0.0))
    plan = search(job, Space(tensor_parallel_sizes=(1,), pipeline_parallel_sizes=(1,)), count=100)
    assert plan.best[0].time.total == pytest.approx(plan.best[-1].time.total, rel=0.3)
    assert plan.best[0].choice.layout.context_parallel_size == 1
    order = [
        one.choice.layout.context_parallel_size
        for one in plan.best
        if one.time.total == plan.best[0].time.total
    ]
    assert order == sorted(order)


def test_search_proposes_ring_and_all_to_all():
    job = small_job(MODEL, world_size=8, batch=8)
    space = Space(
        context_parallel_sizes=(4,), tensor_parallel_sizes=(1, 2), pipeline_parallel_sizes=(1,)
    )
    found = {
        one.choice.context_parallel_attention: one for one in search(job, space, count=100).best
    }
    assert set(found) == set(EXCHANGES)
    traded = found["all_to_all"].choice
    assert "all-to-all" in traded.describe()
    assert PTDPConfig(**traded.options()).context_parallel_attention == "all_to_all"
    assert "context_parallel_attention" not in found["ring"].choice.options()
    # Sixteen heads are too few for 32 ranks.
    few = small_job(
        dataclasses.replace(MODEL, num_heads=16, num_kv_heads=8), world_size=32, batch=32
    )
    wide = Space(
        context_parallel_sizes=(32,), tensor_parallel_sizes=(1,), pipeline_parallel_sizes=(1,)
    )
    assert {one.choice.context_parallel_attention for one in search(few, wide, count=100).best} == {
        "ring"
    }
