"""Text of the start-up table."""

import lightning.pytorch as L
import pytest
from torch.utils.data import DataLoader

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.callbacks.run_summary import StageSummary, StrategySummary, render
from lightning_ptdp.models import GPTConfig, LitGPT, num_parameters
from lightning_ptdp.models.size import active_parameters
from lightning_ptdp.world.layout import ParallelLayout
from tests.expert_parallel.toy import LitMixture, Run
from tests.letters import E, M, P, T, Z
from tests.parity import make_trainer

INTERLEAVED = StrategySummary(
    layout=ParallelLayout(
        world_size=4,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        virtual_pipeline_size=2,
        sequence_parallel=True,
    ),
    schedule="interleaved",
    num_microbatches=8,
    stages=tuple(
        StageSummary(
            stage=stage, rank=stage % 2, first_layer=first, last_layer_exclusive=last, extra=extra
        )
        for stage, (first, last, extra) in enumerate(
            [(0, 1, "embedding"), (1, 3, ""), (3, 4, ""), (4, 4, "norm, head")]
        )
    ),
    parameters_per_rank=(912_500, 912_500, 1_234_567, 1_234_567),
    bubble=1 / 16,
    notes=("vocabulary padded from 8191 to 8192",),
)


def test_summary_of_interleaved_layout():
    assert render(INTERLEAVED).splitlines() == [
        "layout      4 processes: tensor 2 x pipeline 2 x data 1, 2 chunks per pipeline rank, "
        "sequence parallel",
        "schedule    interleaved, 8 microbatches, bubble 6.2 %",
        "parameters  912.5 K to 1.2 M per rank",
        "",
        "stage  ranks  layers  also",
        "    0  0-1    0       embedding",
        "    1  2-3    1-2",
        "    2  0-1    3",
        "    3  2-3    none    norm, head",
        "",
        "note: vocabulary padded from 8191 to 8192",
    ]


def test_summary_of_single_process_has_no_stages_or_bubble():
    summary = StrategySummary(
        layout=ParallelLayout(world_size=1),
        schedule="none",
        num_microbatches=1,
        parameters_per_rank=(999,),
    )
    assert render(summary).splitlines() == [
        "layout      1 process: tensor 1 x pipeline 1 x data 1",
        "schedule    none, 1 microbatch",
        "parameters  999 per rank",
    ]


def test_summary_of_moe_shows_active_parameters():
    summary = StrategySummary(
        layout=ParallelLayout(world_size=2, expert_parallel_size=2),
        schedule="none",
        num_microbatches=1,
        parameters_per_rank=(10_000, 10_000),
        parameters=18_000,
        active_parameters=4_000,
    )
    assert (
        render(summary).splitlines()[-1]
        == "parameters  10.0 K per rank; 18.0 K in total, 4.0 K active per token"
    )


ETP = "expert_tensor_parallel_size"
GPT_MOE = GPTConfig(
    vocabulary_size=51,
    sequence_length=8,
    num_layers=3,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=1,
    mlp="swiglu",
    bias=False,
    num_experts=8,
    experts_per_token=3,
    shared_experts=1,
    expert_hidden_size=24,
    dense_layers=1,
)


class Told(L.Callback):
    """Callback that stores the strategy's summary at the start of ``fit``."""

    def on_fit_start(self, trainer, module):
        self.summary = trainer.strategy.summary()


def _summary(rank, layout, module):
    told = Told()
    trainer = make_trainer(
        PTDPStrategy(**layout), 4 if layout else 1, max_steps=0, callbacks=[told]
    )
    trainer.fit(
        LitGPT(GPT_MOE) if module is LitGPT else LitMixture(Run()), DataLoader([0, 0], batch_size=2)
    )
    return told.summary


@pytest.mark.parametrize(
    "layout",
    [{}, {E: 4, Z: "optimizer"}, {T: 2, E: 2, ETP: 2}, {P: 2, E: 2, M: 2}, {T: 2, P: 2, M: 2}],
)
def test_parameters_are_counted_once_in_every_layout(layout, pool):
    for found in pool.run(_summary, world_size=4 if layout else 1, args=(layout, LitGPT)):
        assert (found.parameters, found.active_parameters) == (
            num_parameters(GPT_MOE),
            active_parameters(GPT_MOE),
        )


def test_summary_omits_unknown_active_parameters(pool):
    """The summary of a user's own mixture of experts has no count of active parameters.

    The number of experts per token is unknown.
    """
    (found, *_) = pool.run(_summary, world_size=4, args=({E: 4}, LitMixture))
    assert found.parameters == 2 * 29 * 8 + 4 * (4 * 8 + 2 * 4 * 8 * 16)
    assert found.active_parameters is None
