"""Parameters and memory of a rank."""

from dataclasses import replace

import pytest
import torch

from lightning_ptdp.models import GPT, GPTConfig, gpt_plan, num_parameters
from lightning_ptdp.pipeline.containers import layer_ranges
from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.planner import find_precision, fullest_rank
from lightning_ptdp.planner.memory import layer_activations, rank_memory
from lightning_ptdp.planner.parameters import job_stages, layers_by_stage
from lightning_ptdp.planner.replica_cost import static_bytes
from lightning_ptdp.planner.software import SOFTWARE
from lightning_ptdp.world.layout import ParallelLayout
from tests.models.configs import VARIANTS
from tests.planner.jobs import MIXTURE, TABLE_1, choice, choice_of, job_of, small_job
from tests.tensor_parallel.sharded import apply_plan
from tests.tensor_parallel.toy import tensor_group

pytestmark = pytest.mark.thorough


def stage_parameters(job, layout):
    return [stage.parameters for stage in job_stages(job, layout)]


@pytest.mark.parametrize(
    "config", [*VARIANTS.values(), MIXTURE], ids=[*VARIANTS.keys(), "dense and mixtures"]
)
def test_parameters_and_stages_match_module(config):
    with torch.device("meta"):
        model = GPT(config)
    job = small_job(config)
    shape = job.shape
    assert (
        shape.parameters
        == sum(stage_parameters(job, ParallelLayout(world_size=1)))
        == num_parameters(config)
    )
    own = sum(
        p.numel() for name, p in model.blocks[0].named_parameters() if ".experts." not in name
    )
    assert shape.layers[0].parameters.on(1) == own
    plan = gpt_plan(config, prefix="")
    parts = find_parts(model, plan)
    for p in range(1, config.num_layers + 1):
        layout = ParallelLayout(world_size=p, pipeline_parallel_size=p)
        ranges = layer_ranges(model, parts=parts, layout=layout)
        assert layers_by_stage(job, p) == [stop - start for start, stop in ranges]
        copies = config.tie_embeddings and p > 1
        table = config.vocabulary_size * config.hidden_size
        assert sum(stage_parameters(job, layout)) == num_parameters(config) + (
            table if copies else 0
        )


def test_stages_are_cut_by_cost_or_by_layers():
    job = small_job(
        GPTConfig(
            vocabulary_size=4096, sequence_length=32, num_layers=8, hidden_size=32, num_heads=2
        )
    )
    assert layers_by_stage(job, 4) == [1, 3, 3, 1]
    by_layers = replace(job, software=SOFTWARE["megatron-2024"])
    assert layers_by_stage(by_layers, 4) == [2, 2, 2, 2]


def parameters_of_a_rank(rank):
    found = {}
    for name, config in VARIANTS.items():
        if config.num_heads % 2 == 0:
            model = GPT(config)
            apply_plan(
                model,
                gpt_plan(config, prefix=""),
                group=tensor_group(rank),
                sequence_parallel=False,
            )
            found[name] = sum(p.numel() for p in model.parameters())
    return found


def test_parameters_match_module_under_tensor_parallelism(pool):
    layout = ParallelLayout(world_size=4, tensor_parallel_size=2, expert_parallel_size=2)
    for found in pool.run(parameters_of_a_rank, world_size=2):
        assert len(found) == sum(config.num_heads % 2 == 0 for config in VARIANTS.values())
        for name, count in found.items():
            assert stage_parameters(small_job(VARIANTS[name]), layout) == [count], name


@pytest.mark.parametrize(
    ("precision", "whole", "sharded"),
    [("bf16-true", 18, 6 + 12 / 8), ("32-true", 16, 8 + 8 / 8), ("bf16-mixed", 16, 8 + 8 / 8)],
)
def test_static_bytes_per_parameter(precision, whole, sharded):
    job = small_job(VARIANTS["gpt2"], precision=precision, world_size=8)
    for options, expected in (
        ({}, whole),
        ({"shard": "optimizer"}, sharded),
        # The ranks of a context group are replicas of the parameters too.
        ({"shard": "optimizer", "context_parallel_size": 2}, sharded),
    ):
        assert sum(static_bytes(job, choice(world_size=8, **options), 1000)) == expected * 1000


@pytest.mark.parametrize(("precision", "state"), [("bf16-true", 8), ("32-true", 4)])
def test_half_states_take_two_bytes_each(precision, state):
    """The master weights remain in float32."""
    assert find_precision(precision, states="bfloat16").state == state
    assert find_precision(precision, states="float32").state == state + 4


@pytest.mark.parametrize("row", TABLE_1, ids=lambda row: f"{row.parameters} B")
def test_table_1_layouts_fit_in_memory(row):
    """The layouts in table 1 of arXiv 2104.04473 ran on GPUs with 80 GB."""
    job = job_of(row)
    assert num_parameters(job.model) == pytest.approx(row.parameters * 1e9, rel=0.03)
    memory = fullest_rank(job, choice_of(row))
    assert 25 * 2**30 < memory.total < job.device.usable_bytes


def test_fullest_rank_is_maximum_over_ranks():
    for row in TABLE_1[4:]:
        job, how = job_of(row), choice_of(row)
        every = [rank_memory(job, how, rank) for rank in range(row.pipeline)]
        assert fullest_rank(job, how) == max(every, key=lambda memory: memory.total)


def test_activation_memory_depends_on_schedule():
    """The first stage of 1F1B holds p microbatches. Interleaved 1F1B holds 1 + (p-1)/(p v) times
    as much (arXiv 2205.05198, section 4.2.3)."""
    row = TABLE_1[6]
    job, p = job_of(row), row.pipeline

    def held(schedule, v=1, placement="loop"):
        layout = {
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": p,
            "virtual_pipeline_size": v,
        }
        how = choice(world_size=row.gpus, b=1, m=96, schedule=schedule, recompute="full", **layout)
        layer = layer_activations(job, how).kept
        inputs = 2048 * (8 + 8 + 12288)  # token ids, position ids, embedding mask
        count = (p if schedule != "gpipe" else 96) if v == 1 else p * v + p - 1
        return (rank_memory(job, how, 0).activations - count * inputs) / layer

    # 80 layers: 10 per stage in 8 stages, 5 per stage in 16.
    assert held("1f1b") == pytest.approx(10 * p)
    assert held("gpipe") == pytest.approx(10 * 96)
    assert held("interleaved_1f1b", v=2) == pytest.approx(10 * p * (1 + (p - 1) / (p * 2)))


def test_microbatches_in_flight_share_cast_weights():
    """Sharded parameters are cast again for each microbatch, because they are freed meanwhile."""
    config = VARIANTS["gpt2"]
    job = small_job(config, precision="bf16-mixed")

    def activations(m, shard):
        options = {"pipeline_parallel_size": 2, "schedule": "gpipe", "shard": shard}
        return rank_memory(job, choice(world_size=4, b=1, m=m, **options), 0).activations

    casts = -(-config.num_layers // 2) * layer_activations(job, choice(b=1)).cast_weights
    assert casts > 0
    assert activations(4, "parameters") - activations(4, "none") == pytest.approx(3 * casts)
    assert activations(1, "parameters") == activations(1, "none")


def test_communicator_memory_depends_on_number_of_groups():
    def nbytes(world_size, **layout):
        job = small_job(VARIANTS["gpt2"], world_size=world_size)
        return fullest_rank(job, choice(world_size=world_size, **layout)).communicators / 2**20

    assert nbytes(1) == 0
    assert nbytes(8) == 688 * 2
    assert nbytes(8, tensor_parallel_size=2, pipeline_parallel_size=2) == 688 * 2 + 544 * 5
    job = small_job(VARIANTS["gpt2"], world_size=8, device="cpu")
    assert fullest_rank(job, choice(world_size=8)).communicators == 0
