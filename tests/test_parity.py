"""Parity of every layout with a single process.

Initial weights are bitwise equal; losses, norms and final weights are numerically equal.
"""

from dataclasses import replace

import pytest

from lightning_ptdp.schedule import CustomSchedule, build_schedule, dump_schedule
from tests.letters import SP, C, D, M, P, R, S, T, V, Z
from tests.parity import assert_near, assert_same
from tests.pipeline.grid import weights_at_the_end
from tests.tiny_gpt import Run

pytestmark = pytest.mark.thorough

LAYOUTS = {
    "m4": (1, {M: 4}),
    "d2": (2, {}),
    "d2m2": (2, {M: 2}),
    "t2": (2, {T: 2}),
    "t2sp": (2, {T: 2, SP: True}),
    "p2": (2, {P: 2, M: 4}),
    "p2 gpipe": (2, {P: 2, M: 4, S: "gpipe"}),
    "p2v2": (2, {P: 2, V: 2, M: 4}),
    "p2v3 uneven": (2, {P: 2, V: 3, M: 4}),
    "p2v2 m3": (2, {P: 2, V: 2, M: 3}),
    "p2 m1": (2, {P: 2, M: 1}),
    "p4 m2": (4, {P: 4, M: 2}),
    "t2p2": (4, {T: 2, P: 2, M: 4}),
    "t2p2v2sp": (4, {T: 2, P: 2, V: 2, M: 4, SP: True}),
    "d2p2": (4, {P: 2, M: 2}),
    "d2t2p2": (8, {T: 2, P: 2, M: 2}),
}
NAMES = ["model.blocks.0", "blocks.1", "2", "4"]
SCHEDULES = {
    "p2 zb_h1": (2, {P: 2, M: 4, S: "zb_h1"}),
    "p4 zb_h1 m5": (4, {P: 4, M: 5, S: "zb_h1"}),
    "d2p2 zb_h1": (4, {P: 2, M: 3, S: "zb_h1"}),
    "p2v2 zb_v": (2, {P: 2, V: 2, M: 4, S: "zb_v"}),
    "p2v2 zb_v m1": (2, {P: 2, V: 2, M: 1, S: "zb_v"}),
    "d2p2v2 zb_v": (4, {P: 2, V: 2, M: 4, S: "zb_v"}),
    "t2p2v2 zb_v": (4, {T: 2, P: 2, V: 2, M: 4, S: "zb_v"}),
    "t2p2v2sp zb_v": (4, {T: 2, P: 2, V: 2, M: 4, S: "zb_v", SP: True}),
    "p2v2 dualpipe_v": (2, {P: 2, V: 2, M: 4, S: "dualpipe_v"}),
    "d2p2v2 dualpipe_v": (4, {P: 2, V: 2, M: 3, S: "dualpipe_v"}),
    "p2v2 groups of 3": (2, {P: 2, V: 2, M: 8, "microbatch_group_size": 3}),
    "p2 custom": (2, {P: 2, M: 4, S: CustomSchedule("weights at the end", weights_at_the_end)}),
    "p2v2 by names": (2, {P: 2, V: 2, M: 4, S: "zb_v", "partition": NAMES}),
    "p2 full": (2, {P: 2, M: 4, S: "1f1b", R: "full"}),
    "p2 selective": (2, {P: 2, M: 4, S: "1f1b", R: "selective"}),
    "p2v2 zb_v full": (
        2,
        {P: 2, V: 2, M: 4, S: "zb_v", R: "full", "recompute_layers": 1},
    ),
    "p2v2 zb_v selective": (2, {P: 2, V: 2, M: 4, S: "zb_v", R: "selective"}),
    "t2p2 zb_h1 full in parts": (
        4,
        {T: 2, P: 2, M: 2, S: "zb_h1", R: "full", "distribute_saved_activations": True},
    ),
    "t2p2sp zb_h1 full": (
        4,
        {T: 2, P: 2, M: 2, S: "zb_h1", SP: True, "tensor_overlap": 3, R: "full"},
    ),
    "p2v2 zb_v offload": (2, {P: 2, V: 2, M: 4, S: "zb_v", R: "offload"}),
    "t2p2sp offload": (
        4,
        {T: 2, P: 2, M: 2, SP: True, R: "offload", "recompute_layers": 2},
    ),
    "t2p2 scattered": (4, {T: 2, P: 2, M: 2, "scatter_gather": True}),
    "t2p2 not scattered": (4, {T: 2, P: 2, M: 2, "scatter_gather": False}),
}

PIPELINE = Run(layers=5, steps=2, global_batch=16)
"""With 16 samples a hidden state is large enough to be scattered."""

QUICK = ("d2", "p2v2", "t2sp")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.quick) if name in QUICK else name for name in LAYOUTS],
)
def test_gpt_with_accumulation_clipping_and_tied_weights(name, parity):
    parity.check(Run(layers=7 if "uneven" in name else 5, accumulate=2), LAYOUTS[name])


@pytest.mark.parametrize("name", ["d2", "t2sp", "p2v2", "t2p2v2sp"])
def test_llama_without_accumulation(name, parity):
    parity.check(Run(llama=True, clip=None), LAYOUTS[name])


@pytest.mark.parametrize("name", ["p2v2 m3", "t2p2", "d2p2"])
def test_eagerly_built_model_with_plain_loss(name, parity):
    run = Run(eager=True, count_tokens=False, ignore_padding=False, accumulate=2)
    parity.check(run, LAYOUTS[name])


def test_incomplete_last_batch(parity):
    parity.check(Run(samples=29), LAYOUTS["p2v2"])


# Those over replicas are in the next test, and in data_parallel/test_every_schedule.py.
@pytest.mark.parametrize("name", [name for name in SCHEDULES if not name.startswith("d2")])
def test_pipeline_schedules_and_options(name, parity):
    ranks = parity.check(PIPELINE, SCHEDULES[name])
    if name == "p2v2 by names":
        assert ranks[0]["ranges"] == ((0, 1), (1, 2), (2, 4), (4, 5))


@pytest.mark.parametrize("name", ["d2p2 zb_h1", "d2p2v2 zb_v", "d2p2v2 dualpipe_v"])
def test_gradient_reduction_during_schedule(name, parity):
    """Each stage has several buckets.

    With gradient accumulation, the reductions would run after the schedule.
    """
    world_size, layout = SCHEDULES[name]
    parity.check(Run(layers=7, steps=2), (world_size, {**layout, "bucket_mb": 1e-2}))


def test_schedule_from_file(parity, tmp_path):
    path = str(tmp_path / "mine.csv")
    dump_schedule(
        build_schedule(
            "zb_v", pipeline_parallel_size=2, virtual_pipeline_size=2, num_microbatches=4
        ),
        path,
    )
    parity.check(PIPELINE, (2, {P: 2, V: 2, M: 4, S: path}))


@pytest.mark.parametrize(
    "place",
    [(2, {D: 2}), (2, {D: 2, Z: "optimizer"}), (4, {D: 2, C: 2}), (4, {D: 2})],
    ids=["d2 on 2 nodes", "d2 ZeRO on 2 nodes", "d2c2 on 2 nodes", "d4 on 2 nodes"],
)
def test_reduction_between_nodes_runs_beside_other_collectives(place, parity):
    world_size, options = place
    parity.check(Run(layers=4), (world_size, {**options, M: 2, "bucket_mb": 1e-3}))


@pytest.mark.parametrize("name", ["p2v2 zb_v", "p2v2 dualpipe_v"])
def test_llama_with_changing_lengths_and_incomplete_last_batch(name, parity):
    parity.check(Run(llama=True, samples=29, steps=9, changing_lengths=True), SCHEDULES[name])


@pytest.mark.parametrize("name", ["p2 zb_h1", "p2v2 zb_v"])
def test_evaluation_between_training_steps_changes_nothing(name, parity):
    run = Run(accumulate=2, validate_every=1)
    found, *_ = parity.check(run, SCHEDULES[name])
    unevaluated = parity.result(replace(run, validate_every=None))
    assert_same(found, unevaluated, but=("val_loss",))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", ["p2 zb_h1", "p2v2 zb_v"])
def test_bfloat16_is_close_to_single_process(name, precision, parity):
    run = Run(precision=precision)
    expected, found = parity.result(run), parity.ranks(run.on(SCHEDULES[name]))[0]
    # A single process reports the loss in its dtype, with a relative precision of 1/128.
    assert_near(
        found["losses"], expected["losses"], 2e-2 if precision == "bf16-true" else 2e-3, "losses"
    )
    assert_near(found["norms"], expected["norms"], 5e-2, "norms")


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_with_dropout_is_bitwise_equal(recompute, parity):
    run, (world_size, layout) = Run(dropout=0.2), SCHEDULES["p2v2 zb_v"]
    kept = parity.result(run.on((world_size, layout)))
    parity.check(run, (world_size, {**layout, R: recompute}), expected=kept, tolerance=0)
