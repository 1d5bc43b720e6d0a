"""Layout search: rules of the papers, and reasons for rejected layouts."""

import dataclasses

import pytest

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.models import GPTConfig
from lightning_ptdp.planner import Job, Space, find_device, search
from tests.planner.jobs import TABLE_1, job_of, small_job

pytestmark = pytest.mark.thorough

PAPER = Space(
    schedules=("1f1b", "interleaved_1f1b"),
    recompute=("full",),
    sequence_parallel=False,
    shard=("none",),
)
"""Options that existed in 2021."""


def degree(candidate):
    """Return (t, p)."""
    layout = candidate.choice.layout
    return layout.tensor_parallel_size, layout.pipeline_parallel_size


def degrees(plan):
    """Return all (t, p) in the order of their fastest candidates."""
    return list(dict.fromkeys(map(degree, plan.best)))


@pytest.mark.parametrize(
    "row", [TABLE_1[index] for index in (0, 2, 4, 6, 8, 9)], ids=lambda row: f"{row.parameters} B"
)
def test_table_1_layouts_are_near_top_of_search(row):
    """A layout of table 1 of arXiv 2104.04473 takes at most 15 % longer than the best of hundreds
    in its search space. The largest model, which has few layouts, takes at most 5 % longer. (t = 4
    is faster than 8 for some of these sizes in measurements: arXiv 2312.12391, 39.1 B on 512
    GPUs.)"""
    plan = search(dataclasses.replace(job_of(row), reserve=0.0), PAPER, count=1000, simulate=False)
    own = next(one for one in plan.best if degree(one) == (row.tensor, row.pipeline))
    allowed = 1.05 if row.parameters > 500 else 1.15
    assert own.time.total <= allowed * plan.best[0].time.total, degrees(plan)
    assert plan.examined >= len(plan.best) >= 15


def test_tensor_parallelism_stays_inside_node():
    """Takeaway 1 of arXiv 2104.04473, section 3.2: t up to the size of a node, then p."""
    row = TABLE_1[6]
    space = dataclasses.replace(
        PAPER, tensor_parallel_sizes=(4, 8, 16, 32), pipeline_parallel_sizes=(2, 4, 8, 16)
    )
    plan = search(job_of(row), space, count=1000, simulate=False)
    fastest = {
        t: next(one for one in plan.best if degree(one)[0] == t).time.total for t in (8, 16, 32)
    }
    assert 1.15 * fastest[8] < fastest[16] < fastest[32]
    assert degrees(plan)[0][0] <= 8


def test_small_model_is_data_parallel_unless_memory_is_tight():
    """Takeaway 2 of arXiv 2104.04473, section 3.3: as little model parallelism as memory allows,
    data parallelism for the rest."""
    job = small_job(GPTConfig.gpt2(), world_size=8, batch=64)
    best = search(job).best[0].choice
    assert best.layout.model_parallel_size == 1
    assert (best.recompute, best.shard, best.schedule) == ("none", "none", "1f1b")
    tight = dataclasses.replace(
        job, device=dataclasses.replace(job.device, memory_bytes=2.2e9, reserved_bytes=0.0)
    )
    squeezed = search(tight).best[0]
    assert (
        squeezed.choice.layout.model_parallel_size > 1
        or squeezed.choice.shard != "none"
        or squeezed.choice.recompute != "none"
    )


def test_search_results_fit_and_are_sorted_by_time():
    job = job_of(TABLE_1[4], "ours")
    plan = search(job, count=12)
    times = [candidate.time.total for candidate in plan.best]
    assert len(times) == 12 and times == sorted(times)
    assert any(candidate.simulated for candidate in plan.best)
    for candidate in plan.best:
        layout, how = candidate.choice.layout, candidate.choice
        assert candidate.memory.total <= job.device.usable_bytes
        assert (
            layout.data_parallel_size * how.micro_batch_size * how.num_microbatches
            == job.global_batch_size
        )
        config = PTDPConfig(**how.options())
        assert config.layout(job.world_size) == layout
        assert config.microbatches(10**6) == how.num_microbatches


def test_long_sequences_use_context_parallelism():
    model = GPTConfig.llama(
        sequence_length=131072,
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        vocabulary_size=128256,
    )
    job = small_job(model, world_size=16, batch=2)
    assert search(job).best[0].choice.layout.context_parallel_size > 1
    assert all(
        c.choice.layout.context_parallel_size == 1
        for c in search(job, Space(context_parallel_sizes=(1,))).best
    )


def test_rejected_layouts_have_reasons():
    model = GPTConfig.gpt2(
        num_layers=6, hidden_size=6144, num_heads=12, vocabulary_size=512, sequence_length=1024
    )
    job = Job(model=model, world_size=96, global_batch_size=36, device=find_device("a100"))
    plan = search(job, count=3)
    reasons = "\n".join(f"{misfit.what}: {misfit.reason}" for misfit in plan.rejected)
    assert "t8: num_heads=12 is not divisible by it" in reasons
    assert "t4 c1 p8: 6 layers cannot fill 8 stages" in reasons
    assert "t1 c1 p1: the global batch of 36 is not divisible by d = 96 replicas" in reasons
    assert "p4 zb_h1 m3: too few microbatches" in reasons
    assert plan.slower
    assert all("times the time of the best" in misfit.reason for misfit in plan.slower)


def test_layouts_exceeding_memory_have_reasons():
    job = dataclasses.replace(job_of(TABLE_1[5], "ours"), world_size=16, global_batch_size=16)
    plan = search(job)
    assert not plan.best
    assert plan.slower == ()
    reasons = {misfit.what: misfit.reason for misfit in plan.rejected}
    assert "alone need" in reasons["t1 p1 d16"]
    assert reasons["t8 p2 d1"].endswith("of 62.4 GiB") or "at least" in reasons["t8 p2 d1"]


def test_search_leaves_memory_reserve():
    """Check that proposed layouts fit, even if memory exceeds its estimate by 23 %.

    With ``reserve=0`` the search uses the memory up to the limit.
    """
    job = small_job(
        GPTConfig.llama(num_layers=24, hidden_size=4096, num_heads=32, sequence_length=2048),
        world_size=8,
        batch=256,
    )
    eager = dataclasses.replace(job, reserve=0.0)
    careful, fullest = (
        max(one.memory.total for one in search(given, count=200, simulate=False).best)
        for given in (job, eager)
    )
    assert 1.23 * careful <= job.device.usable_bytes
    assert job.limit_bytes < fullest <= job.device.usable_bytes == eager.limit_bytes
    with pytest.raises(ValueError, match="reserve=1 must be a share"):
        dataclasses.replace(job, reserve=1)


def test_invalid_search_options_are_refused():
    for wishes, words in (
        ({"schedules": ("2f2b",)}, "schedules has '2f2b'"),
        ({"recompute": ("some",)}, "recompute=.*'some'"),
        ({"tensor_parallel_sizes": (0,)}, r"tensor_parallel_sizes=\(0,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            Space(**wishes)
    with pytest.raises(ValueError, match="count=0"):
        search(small_job(GPTConfig()), count=0)
    with pytest.raises(ValueError, match="world_size=0"):
        small_job(GPTConfig(), world_size=0)
    with pytest.raises(ValueError, match="longer than the model's 1024"):
        dataclasses.replace(small_job(GPTConfig()), sequence_length=2048)
