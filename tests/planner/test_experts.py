"""Mixtures of experts in the planner: memory, time and proposed layouts."""

import re
from dataclasses import replace

import pytest
import torch

from lightning_ptdp.models import GPT, num_parameters
from lightning_ptdp.planner import (
    Space,
    UnfitSize,
    fullest_rank,
    layer_time,
    search,
    step_time,
)
from lightning_ptdp.planner.communication import group_link
from lightning_ptdp.planner.memory import layer_activations, rank_memory
from lightning_ptdp.planner.parameters import job_stages
from lightning_ptdp.planner.pass_time import product_time
from lightning_ptdp.planner.replica_cost import static_bytes
from lightning_ptdp.planner.search import why_nothing_fits
from lightning_ptdp.planner.shapes import ExpertShape
from lightning_ptdp.planner.sublayer_cost import expert_kept, expert_time
from lightning_ptdp.world.layout import ParallelLayout
from tests.memory import kept_bytes
from tests.models.configs import MIXTRAL
from tests.planner.jobs import MIXTURE, MODELS, choice, small_job

pytestmark = pytest.mark.thorough

SHAPE = ExpertShape(number=8, chosen=2, hidden=4096, width=14336)


def test_expert_parameters_match_module():
    with torch.device("meta"):
        model = GPT(MIXTURE)
    job = small_job(MIXTURE)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    whole, shared = (
        ParallelLayout(world_size=8, pipeline_parallel_size=2, expert_parallel_size=e)
        for e in (1, 4)
    )
    assert (
        sum(stage.experts for stage in job_stages(job, whole))
        == experts
        == 4 * sum(stage.experts for stage in job_stages(job, shared))
    )
    parameters = sum(stage.parameters for stage in job_stages(job, shared))
    assert parameters == num_parameters(MIXTURE) - experts * 3 / 4


def test_static_bytes_of_dense_and_expert_parameters():
    """ZeRO-1 shards dense states over d c ranks, and expert states over d c / e replicas."""
    job = small_job(MIXTURE, world_size=16)
    how = choice(
        world_size=16, tensor_parallel_size=2, context_parallel_size=2, expert_parallel_size=4
    )
    assert sum(static_bytes(job, how, 1000, 600)) == 18 * 1000
    sharded = replace(how, shard="optimizer")
    assert sum(static_bytes(job, sharded, 1000, 600)) == 6 * 1000 + 12 * (400 / 8 + 600 / 2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_mixture_activations_match_saved_bytes_of_block(precision):
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    block = GPT(MIXTURE).blocks[-1].to(dtype)
    x = torch.randn(2, 48, 64, dtype=dtype, requires_grad=True)
    kept = kept_bytes(lambda: block(x + 0, torch.zeros(2, 3))[0], block.parameters())
    job = small_job(MIXTURE, precision=precision, device="cpu")
    expected = layer_activations(job, choice(b=2), job.shape.layers[-1]).kept
    assert expected == pytest.approx(kept, rel=0.03), expected / kept


def test_expert_activations_depend_on_tp_and_imbalance():
    job = small_job(MIXTRAL, world_size=16)
    one, shared = (choice(world_size=16, b=1, expert_parallel_size=e) for e in (1, 8))
    assert expert_kept(SHAPE, job, one) == expert_kept(SHAPE, job, shared)
    cut = choice(world_size=16, b=1, expert_parallel_size=8, tensor_parallel_size=2)
    assert expert_kept(SHAPE, job, cut) == expert_kept(SHAPE, job, shared) / 2
    uneven = replace(job, imbalance=2.0)
    assert 1.5 < expert_kept(SHAPE, uneven, shared) / expert_kept(SHAPE, job, shared) < 2
    with pytest.raises(
        ValueError,
        match=r"imbalance=0\.5 must be 1 or more, .* the busiest rank's share over the mean",
    ):
        replace(job, imbalance=0.5)


def test_expert_time_matches_products_and_all_to_all():
    """Each of 8 ranks has one expert and gets 8,192 rows: 4,096 tokens select two experts each."""
    job = small_job(MIXTRAL, world_size=16)
    how = choice(world_size=16, b=1, expert_parallel_size=8)
    time, group = expert_time(SHAPE, job, how), group_link(how.layout, job.cluster, "expert")
    up, down = (
        product_time(job.device, 2, 8192, 2 * 14336, 4096),
        product_time(job.device, 2, 8192, 4096, 14336),
    )
    assert time.forward == pytest.approx(up + down)
    assert time.dispatch == pytest.approx(2 * group.all_to_all(8192 * 4096 * 2))
    assert time.weight < time.backward < 2.5 * time.forward
    # A rank with all experts computes as many rows in eight groups. Small groups are slow.
    alone, few = choice(world_size=16, b=1), choice(world_size=16, b=1, context_parallel_size=16)
    assert expert_time(SHAPE, job, alone).forward == pytest.approx(
        product_time(job.device, 2, 1024, 28672, 4096, 8)
        + product_time(job.device, 2, 1024, 4096, 14336, 8)
    )
    assert expert_time(SHAPE, job, alone).dispatch == 0.0
    assert expert_time(SHAPE, job, few).forward > 1.3 * expert_time(SHAPE, job, alone).forward / 16
    uneven = expert_time(SHAPE, replace(job, imbalance=1.5), how)
    assert (
        uneven.forward == pytest.approx(1.5 * time.forward, rel=0.05)
        and uneven.dispatch > time.dispatch
    )


def test_step_time_includes_experts_and_dispatch():
    job = small_job(MIXTRAL, world_size=64, batch=256)
    times = {
        e: step_time(
            job, choice(world_size=64, b=1, m=16, pipeline_parallel_size=4, expert_parallel_size=e)
        )
        for e in (1, 8)
    }
    for e, time in times.items():
        assert time.total == pytest.approx(sum(time.parts.values()))
        assert (time.dispatch > 0) == (e > 1) and 0.5 < time.experts / time.total < 0.9
    # Gradients of experts sharded over eight ranks are reduced over two.
    assert times[8].gradients < times[1].gradients
    mixed, plain = small_job(MIXTURE, world_size=64), choice(world_size=64)
    assert (
        layer_time(mixed, plain, mixed.shape.layers[-1]).experts
        > layer_time(mixed, plain).experts
        == 0.0
    )
    dense = small_job(MODELS["llama"])
    assert not step_time(dense, choice()).experts + step_time(dense, choice()).dispatch


def test_search_proposes_expert_parallel_layouts():
    job = small_job(MIXTRAL, world_size=64, batch=256)
    plan = search(job, Space(shard=("none", "optimizer")), count=40)
    assert {candidate.choice.layout.expert_parallel_size for candidate in plan.best} > {8}
    best = plan.best[0]
    assert best.choice.options()["expert_parallel_size"] == 8 and "e8" in best.choice.describe()
    assert all(candidate.memory.total <= job.device.usable_bytes for candidate in plan.best)
    # Most of the step is compute. A plan that filled the memory wrongly would have too small
    # activations.
    held = fullest_rank(job, best.choice)
    assert held.activations > held.logits
    reasons = {misfit.what: misfit.reason for misfit in plan.rejected}
    assert "alone need" in reasons["t1 p1 d64 e2"]
    asked = search(
        job, Space(expert_parallel_sizes=(4, 3, 16), tensor_parallel_sizes=(1,)), count=5
    )
    assert {candidate.choice.layout.expert_parallel_size for candidate in asked.best} == {4}
    reasons = {misfit.what: misfit.reason for misfit in asked.rejected}
    assert (
        reasons["e3"] == reasons["e16"].replace("16", "3") == "num_experts=8 is not divisible by it"
    )
    dense = search(small_job(MODELS["llama"], world_size=2), Space(expert_parallel_sizes=(2,)))
    assert UnfitSize(what="e2", reason="the model has no experts") in dense.rejected


def test_remedy_names_expert_parallelism_if_nothing_fits():
    job = small_job(MIXTRAL, world_size=16, batch=64)
    space = Space(
        expert_parallel_sizes=(1,), pipeline_parallel_sizes=(1,), tensor_parallel_sizes=(1,)
    )
    plan = search(job, space)
    assert not plan.best
    assert re.search(
        r" e[248] ", why_nothing_fits(plan, space).partition("without the restrictions")[2]
    )


def test_expert_tensor_parallelism_halves_expert_parameters():
    """Each of t = 2 ranks has half of an expert's parameters and gets all rows of the replica. No
    gradients are summed over these ranks."""
    job = small_job(MIXTRAL, world_size=64, batch=256)
    whole = choice(world_size=64, b=1, m=8, tensor_parallel_size=2, expert_parallel_size=4)
    split = replace(whole, layout=replace(whole.layout, expert_tensor_parallel_size=2))
    assert SHAPE.local(split.layout) == SHAPE.local(whole.layout) / 2 == 3 * 4096 * 14336
    (halved,), (undivided,) = (job_stages(job, how.layout) for how in (split, whole))
    assert 2 * halved.experts == undivided.experts
    times = [expert_time(SHAPE, job, how) for how in (whole, split)]
    assert times[1].dispatch > 1.5 * times[0].dispatch and times[1].forward == pytest.approx(
        times[0].forward, rel=0.1
    )
    assert step_time(job, split).gradients < step_time(job, whole).gradients
    found = search(
        job,
        Space(
            tensor_parallel_sizes=(2,),
            expert_tensor_parallel_sizes=(2,),
            pipeline_parallel_sizes=(1,),
        ),
        count=3,
    )
    assert (
        "e8 et2" in found.best[0].choice.describe() or "e4 et2" in found.best[0].choice.describe()
    )
    assert found.best and all(
        one.choice.options()["expert_tensor_parallel_size"] == 2 for one in found.best
    )
    assert not search(
        job, Space(tensor_parallel_sizes=(2,), expert_tensor_parallel_sizes=(4,))
    ).best


def test_fullest_rank_of_dense_and_expert_layers_is_maximum():
    """The first stages have many dense layers. The mixtures in later stages are heavier."""
    model = replace(MIXTRAL, dense_layers=5, ffn_hidden_size=4096, expert_hidden_size=14336)
    job = small_job(model, world_size=64, batch=64)
    for p in (2, 4, 8, 16):
        how = choice(
            world_size=64,
            b=1,
            m=16,
            pipeline_parallel_size=p,
            expert_parallel_size=4,
            recompute="full",
        )
        every = [rank_memory(job, how, rank) for rank in range(p)]
        assert fullest_rank(job, how).total == max(memory.total for memory in every)
