"""Planner estimates against published trainings of mixtures of experts, with errors in both
directions. Nothing is fitted on them.

arXiv 2504.14960, tables 3 and 4, rows "MCore w/ Folding": H100s, bf16, 4,096 tokens, balanced
experts. Layouts are the paper's. Chunks have one layer and microbatches one sample, as in the
mappings that the authors publish for two of these models (Megatron-LM,
megatron/core/transformer/moe/README.md, "Reference Best Parallel Mapping"). The first row is from
that page: 468 TFLOP/s. Rows with more expert-parallel ranks than d c have no counterpart here.
"""

from statistics import fmean
from typing import NamedTuple

import pytest

from lightning_ptdp.models import GPTConfig
from lightning_ptdp.planner import SOFTWARE, Choice, Job, find_device, fullest_rank, step_time
from lightning_ptdp.planner.configured_shape import PlannedGPT
from lightning_ptdp.world.layout import ParallelLayout
from tests.planner.jobs import mean_and_worst

pytestmark = pytest.mark.pure

PEAK = 989.5


class Mixture(NamedTuple):
    """A model and its published layout."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    experts: int
    chosen: int
    width: int
    shared: int
    vocabulary: int
    degrees: tuple[int, int, int]  # t, e, p


MIXTRAL_7B = Mixture(32, 4096, 32, 8, 8, 2, 14336, 0, 32000, (1, 8, 4))
MIXTRAL_22B = Mixture(56, 6144, 48, 8, 8, 2, 16384, 0, 32000, (2, 8, 8))
QWEN2_57B = Mixture(28, 3584, 28, 4, 64, 8, 2560, 8, 151936, (2, 4, 4))
FINE_22B = Mixture(56, 6144, 48, 8, 64, 8, 2048, 0, 32000, (4, 8, 8))
LLAMA_8_70B = Mixture(80, 8192, 64, 8, 8, 2, 28672, 0, 128256, (8, 8, 16))

# Model, GPUs, batch, MFU in percent.
ROWS = (
    (MIXTRAL_7B, 64, 256, 100 * 468 / PEAK),
    (MIXTRAL_22B, 128, 256, 49.3),
    (MIXTRAL_22B, 128, 1024, 52.2),
    (MIXTRAL_22B, 256, 1024, 50.7),
    (MIXTRAL_22B, 512, 1024, 48.9),
    (MIXTRAL_22B, 1024, 1024, 44.9),
    (QWEN2_57B, 64, 256, 39.0),
    (QWEN2_57B, 64, 1024, 39.9),
    (QWEN2_57B, 128, 1024, 39.7),
    (QWEN2_57B, 256, 1024, 38.1),
    (QWEN2_57B, 512, 1024, 36.6),
    (QWEN2_57B, 1024, 1024, 33.4),
    (FINE_22B, 256, 1024, 29.3),
    (FINE_22B, 512, 1024, 26.7),
    (FINE_22B, 1024, 1024, 25.5),
    (LLAMA_8_70B, 1024, 1024, 41.5),
)


def planned(one, gpus, batch, **degrees):
    model = GPTConfig.llama(
        vocabulary_size=one.vocabulary,
        sequence_length=4096,
        num_layers=one.layers,
        hidden_size=one.hidden,
        num_heads=one.heads,
        num_kv_heads=one.kv_heads,
        num_experts=one.experts,
        experts_per_token=one.chosen,
        expert_hidden_size=one.width,
        shared_experts=one.shared,
    )
    job = Job(
        model=model,
        world_size=gpus,
        global_batch_size=batch,
        device=find_device("h100"),
        software=SOFTWARE["megatron-2024"],
    )
    t, e, p = one.degrees
    layout = ParallelLayout(
        world_size=gpus,
        tensor_parallel_size=t,
        sequence_parallel=t > 1,
        expert_parallel_size=e,
        pipeline_parallel_size=p,
        virtual_pipeline_size=-(-one.layers // p),
    )
    m = batch // layout.data_parallel_size
    return job, Choice(
        layout=layout,
        micro_batch_size=1,
        num_microbatches=m,
        schedule="interleaved_1f1b",
        shard="optimizer",
    )


def test_mfu_of_mixtures_is_within_18_percent():
    """Check that estimated MFU is within 6.5 % of published MFU on average, and 18 % at most.

    Known causes of the largest errors:

    - In the first row the router distributed tokens unevenly.
    - In the last rows with experts an eighth as wide (t = 4, 512 and 1,024 GPUs) the estimate is 16
      and 18 % too fast. It seems to miss the slowdown of products by concurrent operations.
    - At t = 8 it is 12 % too slow, because overlap inside Transformer Engine is not counted.
    """
    errors = [
        100 * step_time(*planned(one, gpus, batch)).mfu / mfu - 1 for one, gpus, batch, mfu in ROWS
    ]
    mean, worst = mean_and_worst(errors)
    assert mean <= 0.065 and worst <= 0.18, errors
    # Mixtral 8x22B and Qwen2-57B-A14B, from 64 to 1,024 GPUs.
    assert fmean(map(abs, errors[1:12])) <= 0.03 and max(map(abs, errors[1:12])) <= 0.065, errors


def test_qwen3_throughput_is_within_3_percent():
    """NeMo AutoModel, docs/performance-summary.md of October 2025: Qwen3-30B-A3B on eight H100s, e
    = 8, full recomputation (examples/benchmark/configs/qwen3_moe_30b_te_deepep.yaml), 277 TFLOP/s
    of model FLOPs."""
    model = PlannedGPT.llama(
        vocabulary_size=151936,
        sequence_length=4096,
        num_layers=48,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        head_size=128,
        num_experts=128,
        experts_per_token=8,
        expert_hidden_size=768,
    )
    job = Job(
        model=model,
        world_size=8,
        global_batch_size=512,
        device=find_device("h100"),
        software=SOFTWARE["megatron-2024"],
    )
    layout = ParallelLayout(world_size=8, expert_parallel_size=8)
    how = Choice(
        layout=layout,
        micro_batch_size=4,
        num_microbatches=16,
        recompute="full",
        shard="optimizer",
    )
    time = step_time(job, how)
    assert time.model_flops / time.total / 8 / 1e12 == pytest.approx(277, rel=0.03)


@pytest.mark.parametrize("row", ROWS[:-1], ids=lambda row: f"{row[1]} GPUs, {row[2]}")
def test_published_mixtures_fit_in_memory(row):
    """Check that the fullest rank of published runs takes over 30 GiB and fits in memory."""
    job, how = planned(*row[:3])
    assert 30 * 2**30 < fullest_rank(job, how).total < job.device.memory_bytes
