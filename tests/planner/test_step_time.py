"""Estimated time of a step."""

import dataclasses

import pytest

from lightning_ptdp.models import GPTConfig
from lightning_ptdp.planner import Link, layer_time, simulated_step_time, step_time
from tests.planner.jobs import choice, small_job

pytestmark = pytest.mark.pure

MODEL = GPTConfig.gpt2(
    vocabulary_size=51200, sequence_length=2048, num_layers=32, hidden_size=4096, num_heads=32
)


@pytest.mark.parametrize("m", [8, 16, 64])
@pytest.mark.parametrize("p", [2, 8])
def test_bubble_fraction_of_1f1b(p, m):
    """The bubble is (p - 1) / m if all stages take the same time, here with a negligible head."""
    model = dataclasses.replace(MODEL, vocabulary_size=8)
    how = choice(world_size=p, pipeline_parallel_size=p, m=m)
    time = step_time(small_job(model, world_size=p, batch=2 * m), how)
    assert time.bubble_fraction == pytest.approx((p - 1) / m, rel=0.01)
    assert time.total == pytest.approx(sum(time.parts.values()))


@pytest.mark.parametrize(
    ("schedule", "v"),
    [
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 4),
        ("zb_h1", 1),
        ("zb_v", 2),
        ("gpipe", 1),
    ],
)
def test_closed_form_agrees_with_simulator(schedule, v):
    how = choice(
        world_size=4, pipeline_parallel_size=4, virtual_pipeline_size=v, m=16, schedule=schedule
    )
    job = small_job(MODEL, world_size=4, batch=32)
    quick, exact = step_time(job, how), simulated_step_time(job, how)
    assert quick.total == pytest.approx(exact.total, rel=0.05)
    assert quick.compute == exact.compute
    assert exact.messages > 0


def test_full_recomputation_adds_a_third_of_compute():
    none, full = (
        layer_time(small_job(MODEL), choice(recompute=recompute)) for recompute in ("none", "full")
    )
    assert (full.forward, full.weight) == (none.forward, none.weight)
    assert full.backward == pytest.approx(none.forward + none.backward)
    assert (full.forward + full.backward) / (none.forward + none.backward) == pytest.approx(
        4 / 3, rel=0.05
    )


def test_slow_link_affects_only_its_own_traffic():
    how = choice(world_size=16, tensor_parallel_size=2, pipeline_parallel_size=4)
    job = small_job(MODEL, world_size=16, batch=16)
    fast = step_time(job, how)
    slow = step_time(on(job, node=Link(bandwidth=30e9, latency_s=5e-6)), how)
    assert slow.tensor > 3 * fast.tensor
    assert slow.compute == pytest.approx(fast.compute)
    slow = step_time(on(job, card=Link(bandwidth=1e9, latency_s=14e-6)), how)
    assert slow.messages > 10 * fast.messages
    assert slow.tensor == fast.tensor


def test_only_slow_host_limits_layer_time():
    job = small_job(MODEL)

    def layer(seconds):
        software = dataclasses.replace(job.software, operation_s=seconds)
        time = layer_time(dataclasses.replace(job, software=software), choice())
        return time.forward + time.backward

    assert layer(0.0) == layer(1e-6)
    assert layer(1e-2) == pytest.approx(3 * job.software.operations * 1e-2)


def on(job, **changes):
    """Return the job on a changed cluster."""
    return dataclasses.replace(
        job,
        device=dataclasses.replace(job.device, cluster=dataclasses.replace(job.cluster, **changes)),
    )
