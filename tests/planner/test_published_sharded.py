"""Planner estimates against published FSDP2 and ZeRO-3 trainings, with errors in both directions.

One number of each preset is fitted on one row here. So is one of the GPU in the first table, which
differs from the data sheet of an H100."""

import dataclasses

import pytest

from lightning_ptdp.models import GPTConfig
from lightning_ptdp.planner import SOFTWARE, Choice, Job, find_device, fullest_rank, step_time
from lightning_ptdp.world.layout import ParallelLayout
from tests.planner.jobs import a100_job, mean_and_worst

pytestmark = pytest.mark.pure

# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: H100s with 96 GB of 2.4 TB/s, limited to
# 500 W.
LIMITED = dataclasses.replace(
    find_device("h100"),
    memory_bytes=95 * 2**30,
    memory_bandwidth=2.4e12,
    sustained=0.84,  # fitted on the second row below
)
# Software, GPUs, tokens a second and GPU, GiB; Llama 3.1 8B, b = 2, selective recomputation (its
# tables 1 and 3).
H100 = (
    ("fsdp2", 8, 5762, 82.4),
    ("fsdp2-compiled", 8, 6667, 77.0),
    ("fsdp2-fp8", 8, 8532, 76.8),
    ("fsdp2", 128, 5605, 67.0),
    ("fsdp2-compiled", 128, 6514, 62.0),
    ("fsdp2-fp8", 128, 8380, 61.8),
)
# The same model, benchmarks/llama3_8b_h200_2025-06_torchtitan.md. "slower" of fsdp2 is
# fitted on the first row.
H200 = (("fsdp2-fp8", 32, 10938, 47.96), ("fsdp2-fp8", 64, 10753, 46.97))
# Its table 2: full recomputation, b = 1, 8 H100s: c, tokens of a sample, tokens a second and GPU.
# Left out, because the estimate is wrong for unknown reasons: c = 4 and 8 (1,071 and 548; 34 and
# 40 % too fast), and the 70 B of table 4 (829; 26 % too slow).
LONG = ((1, 32768, 3890), (2, 65536, 2540))
# MosaicML, llm-foundry, scripts/train/benchmarking/README.md, "H100 80GB BF16": layers, hidden size,
# heads; tokens of a sample, GPUs, b, full recomputation, parameters. torch's FSDP, with parameters
# in bf16 between gathering and freeing. MPT is GPT-2 with a vocabulary of 50,368. The table gives
# no bytes, but every row was trained in 80 GiB, most with the largest b that fits.
MPT = (
    ((80, 8192, 64), 2048, 64, 8, True, 64862437376),
    ((48, 7168, 56), 8192, 8, 1, True, 30019254272),
    ((48, 7168, 56), 2048, 8, 3, True, 29975214080),
    ((40, 5120, 40), 16384, 8, 3, True, 12927354880),
    ((40, 5120, 40), 2048, 8, 2, False, 12853954560),
    ((32, 4096, 32), 65536, 8, 1, True, 6918905856),
    ((32, 4096, 32), 2048, 8, 6, False, 6658859008),
    ((32, 2560, 20), 8192, 8, 3, False, 2667566080),
    ((24, 2048, 16), 2048, 64, 20, False, 1315950592),
    ((24, 1536, 12), 512, 8, 96, False, 758111232),
)
# arXiv 2104.04473, table 2, ZeRO-3: (layers, hidden size, heads), (GPUs, b, TFLOP/s a GPU).
# "slower" is fitted on the first row.
ZERO_3 = (
    ((96, 12288, 96), ((384, 4, 144), (768, 2, 88), (1536, 1, 44))),
    ((105, 20480, 128), ((640, 4, 138), (1120, 2, 98), (2240, 1, 48))),
)


def llama(software, device, gpus, *, b, length, c=1, recompute):
    model = GPTConfig.llama(
        vocabulary_size=128256,
        sequence_length=length,
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14336,
    )
    layout = ParallelLayout(world_size=gpus, context_parallel_size=c)
    job = Job(
        model=model,
        world_size=gpus,
        global_batch_size=b * gpus // c,
        device=device,
        software=SOFTWARE[software],
    )
    return job, Choice(layout=layout, micro_batch_size=b, num_microbatches=1, recompute=recompute)


def tokens_error(job, choice, published):
    return job.tokens / step_time(job, choice).total / job.world_size / published - 1


def test_fsdp2_throughput_is_within_11_percent():
    errors = []
    for device, rows in ((LIMITED, H100), (find_device("h200"), H200)):
        for software, gpus, tokens, _ in rows:
            job, how = llama(software, device, gpus, b=2, length=8192, recompute="selective")
            errors.append(tokens_error(job, how, tokens))
    mean, worst = mean_and_worst(errors)
    assert mean <= 0.045 and worst <= 0.11, errors
    # Speedups of float8 and of compilation, on 8 and on 128 GPUs.
    for eager, compiled, float8 in (errors[:3], errors[3:6]):
        assert abs((1 + float8) / (1 + compiled) - 1) <= 0.04
        assert abs((1 + compiled) / (1 + eager) - 1) <= 0.08


def test_fsdp2_throughput_with_context_parallelism():
    for c, length, tokens in LONG:
        job, how = llama("fsdp2-fp8", LIMITED, 8, b=1, length=length, c=c, recompute="full")
        assert abs(tokens_error(job, how, tokens)) <= 0.085


def test_fsdp2_preset_predicts_longer_steps():
    """Check that the FSDP2 preset predicts steps 15 to 30 % longer than this package's preset."""
    job, how = llama("ours-compiled", find_device("h200"), 32, b=2, length=8192, recompute="none")
    bf16 = dataclasses.replace(job, software=SOFTWARE["fsdp2-compiled"])
    ours, theirs = (step_time(one, how).total for one in (job, bf16))
    assert 1.15 * ours < theirs < 1.3 * ours


def test_fsdp2_memory_is_close_to_published():
    """Readings are of reserved memory. On full GPUs it is well above the allocated memory."""
    for device, rows in ((LIMITED, H100), (find_device("h200"), H200)):
        for software, gpus, _, reading in rows:
            memory = fullest_rank(
                *llama(software, device, gpus, b=2, length=8192, recompute="selective")
            )
            tensors = (memory.total - memory.communicators) / 2**30
            assert 0.68 <= tensors / reading <= 1.06, (software, gpus, tensors)


def test_trainings_of_mpt_fit_their_gpus():
    shares = []
    for (layers, hidden, heads), length, gpus, b, recomputes, parameters in MPT:
        model = GPTConfig.gpt2(
            vocabulary_size=50368,
            sequence_length=length,
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
        )
        job = Job(
            model=model,
            world_size=gpus,
            global_batch_size=b * gpus,
            device=find_device("h100"),
            software=dataclasses.replace(SOFTWARE["fsdp2"], again=None),
        )
        assert job.shape.parameters == parameters
        how = Choice(
            layout=ParallelLayout(world_size=gpus),
            micro_batch_size=b,
            num_microbatches=1,
            recompute="full" if recomputes else "none",
        )
        memory = fullest_rank(job, how)
        shares.append((memory.total - memory.communicators) / (80 * 2**30))
    assert max(shares) <= 1.005, shares
    assert sorted(shares)[len(shares) // 2] >= 0.75, shares


def test_fsdp2_shards_parameters_over_replicas():
    parts = [
        fullest_rank(*llama("fsdp2", LIMITED, gpus, b=2, length=8192, recompute="full")).parts
        for gpus in (8, 16)
    ]
    for name in ("weights", "gradients", "optimizer"):
        assert parts[0][name] == pytest.approx(2 * parts[1][name])


def test_zero_3_throughput_is_within_11_percent():
    """The network is the bottleneck from 768 GPUs on. The rate of one card per ring and a third
    all-gather of the parameters were inferred from these rows. They show consistency, not
    prediction."""
    errors = []
    for sizes, rows in ZERO_3:
        for gpus, b, tflops in rows:
            job = a100_job(sizes, gpus=gpus, batch=gpus * b, software="deepspeed-zero3")
            how = Choice(
                layout=ParallelLayout(world_size=gpus),
                micro_batch_size=b,
                num_microbatches=1,
                recompute="full",
            )
            errors.append(step_time(job, how).tflops / tflops - 1)
    mean, worst = mean_and_worst(errors)
    assert mean <= 0.06 and worst <= 0.11, errors


def test_float8_is_refused_on_device_without_it():
    with pytest.raises(
        ValueError,
        match="software='fsdp2-fp8' computes in float8, but the float8 rate of a100-80gb is unknown",
    ):
        llama("fsdp2-fp8", find_device("a100"), 8, b=1, length=2048, recompute="none")
