"""Planner jobs shared by the tests of this folder."""

from statistics import fmean
from typing import Any, NamedTuple

from lightning_ptdp.models import GPTConfig
from lightning_ptdp.planner import SOFTWARE, Choice, Job, find_device, find_precision
from lightning_ptdp.world.layout import ParallelLayout


class Row(NamedTuple):
    """A row of table 1 of arXiv 2104.04473. Microbatch and chunks are from Megatron-LM,
    examples/academic_paper_scripts/sc21/run_table_1.sh."""

    parameters: float  # in 10^9
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    tflops: int
    micro_batch: int
    chunks: int


TABLE_1 = (
    Row(1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 16, 1),
    Row(3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 16, 1),
    Row(7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 16, 1),
    Row(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 8, 1),
    Row(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 4, 1),
    Row(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
    Row(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
    Row(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
    Row(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3),
    Row(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 1, 1),
)


def a100_job(
    sizes: tuple[int, int, int], *, gpus: int, batch: int, software: str = "megatron-2021"
) -> Job:
    """Return the job of a GPT of (layers, hidden, heads) on A100s. Precision, sequence length and
    dropout are the papers'."""
    layers, hidden, heads = sizes
    model = GPTConfig.gpt2(
        vocabulary_size=51200,
        sequence_length=2048,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        dropout=0.1,
    )
    return Job(
        model=model,
        world_size=gpus,
        global_batch_size=batch,
        device=find_device("a100"),
        software=SOFTWARE[software],
    )


def job_of(row: Row, software: str = "megatron-2021") -> Job:
    """Return the job of the row's model on its GPUs."""
    sizes = row.layers, row.hidden, row.heads
    return a100_job(sizes, gpus=row.gpus, batch=row.batch, software=software)


def choice_of(row: Row, **changes: Any) -> Choice:
    """Return the row's layout, with full recomputation."""
    layout = ParallelLayout(
        world_size=row.gpus,
        tensor_parallel_size=row.tensor,
        pipeline_parallel_size=row.pipeline,
        virtual_pipeline_size=row.chunks,
    )
    schedule = "1f1b" if row.chunks == 1 else "interleaved_1f1b"
    options: dict[str, Any] = {
        "micro_batch_size": row.micro_batch,
        "recompute": "full",
        "schedule": schedule,
    } | changes
    m = row.batch // (layout.data_parallel_size * options["micro_batch_size"])
    return Choice(layout=layout, num_microbatches=m, **options)


def mean_and_worst(errors: list[float]) -> tuple[float, float]:
    """Return the mean and the maximum of the absolute errors. Both signs must occur."""
    assert len({error > 0 for error in errors}) == 2, f"all errors have the same sign: {errors}"
    return fmean(map(abs, errors)), max(map(abs, errors))


SIZES: dict[str, Any] = {
    "vocabulary_size": 64,
    "sequence_length": 48,
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
}
MODELS = {
    "gpt2": GPTConfig.gpt2(**SIZES),
    "llama": GPTConfig.llama(**SIZES, num_kv_heads=2),
    "gpt2, dropout": GPTConfig.gpt2(**SIZES, dropout=0.1),
}
MIXTURE = GPTConfig.llama(
    **SIZES,
    num_experts=8,
    experts_per_token=2,
    expert_hidden_size=96,
    shared_experts=1,
    dense_layers=1,
    ffn_hidden_size=160,
)


def small_job(
    model: GPTConfig,
    *,
    precision: str = "bf16-true",
    world_size: int = 1,
    batch: int = 8,
    device: str = "h100",
) -> Job:
    """Return a job on H100s or on other devices."""
    return Job(
        model=model,
        world_size=world_size,
        global_batch_size=batch,
        device=find_device(device),
        precision=find_precision(precision),
    )


def choice(
    *, world_size: int = 1, b: int = 2, m: int = 4, schedule: str = "1f1b", **options: Any
) -> Choice:
    """Return a choice. Options are degrees of the layout and fields of ``Choice``."""
    kept = {
        key: options.pop(key)
        for key in ("recompute", "shard", "distribute_saved_activations")
        if key in options
    }
    placement = "v" if schedule == "zb_v" else "loop"
    layout = ParallelLayout(world_size=world_size, placement=placement, **options)
    return Choice(layout=layout, micro_batch_size=b, num_microbatches=m, schedule=schedule, **kept)
