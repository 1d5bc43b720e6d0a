"""The start-up table, as a reader sees it."""

from __future__ import annotations

from lightning_ptdp.summary import StageSummary, StrategySummary, render
from lightning_ptdp.world.layout import ParallelLayout

INTERLEAVED = StrategySummary(
    layout=ParallelLayout(
        world_size=4, tensor_parallel_size=2, pipeline_parallel_size=2, virtual_pipeline_size=2, sequence_parallel=True
    ),
    schedule="interleaved",
    num_microbatches=8,
    stages=tuple(
        StageSummary(stage=stage, rank=stage % 2, first_layer=first, last_layer_exclusive=last, extra=extra)
        for stage, (first, last, extra) in enumerate([(0, 1, "embedding"), (1, 3, ""), (3, 4, ""), (4, 4, "norm, head")])
    ),
    parameters_per_rank=(912_500, 912_500, 1_234_567, 1_234_567),
    bubble=1 / 16,
    notes=("vocabulary padded from 8191 to 8192",),
)


def test_an_interleaved_layout() -> None:
    assert render(INTERLEAVED).splitlines() == [
        "layout      4 processes: tensor 2 x pipeline 2 x data 1, 2 chunks a pipeline rank, sequence parallel",
        "schedule    interleaved, 8 microbatches, bubble 6.2 %",
        "parameters  912.5 K to 1.2 M a rank",
        "",
        "stage  ranks  layers  also",
        "    0  0-1    0       embedding",
        "    1  2-3    1-2",
        "    2  0-1    3",
        "    3  2-3    none    norm, head",
        "",
        "note: vocabulary padded from 8191 to 8192",
    ]


def test_one_process_has_no_stages_and_no_bubble() -> None:
    summary = StrategySummary(
        layout=ParallelLayout(world_size=1), schedule="none", num_microbatches=1, parameters_per_rank=(999,)
    )
    assert render(summary).splitlines() == [
        "layout      1 process: tensor 1 x pipeline 1 x data 1",
        "schedule    none, 1 microbatch",
        "parameters  999 a rank",
    ]
