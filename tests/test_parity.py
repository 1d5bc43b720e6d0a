"""The same answer in every layout: initial weights bitwise, loss curve, norms and final weights of
one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ptdp.schedule import CustomSchedule, build_schedule, dump_schedule
from tests.letters import SP, M, P, S, T, V
from tests.parity import Frozen, Run, assert_same, fit
from tests.pipeline.grid import weights_at_the_end
from tests.pool import Pool

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
NAMES = ["model.blocks.0", "blocks.1", "3", "6"]
SCHEDULES: dict[str, tuple[int, dict[str, Any]]] = {
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
    "p2 full": (2, {P: 2, M: 4, S: "1f1b", "recompute": "full"}),
    "p2 selective": (2, {P: 2, M: 4, S: "1f1b", "recompute": "selective"}),
    "p2v2 zb_v full": (
        2,
        {P: 2, V: 2, M: 4, S: "zb_v", "recompute": "full", "recompute_layers": 1},
    ),
    "p2v2 zb_v selective": (2, {P: 2, V: 2, M: 4, S: "zb_v", "recompute": "selective"}),
    "t2p2 zb_h1 full in parts": (
        4,
        {T: 2, P: 2, M: 2, S: "zb_h1", "recompute": "full", "distribute_saved_activations": True},
    ),
    "t2p2sp zb_h1 full": (
        4,
        {T: 2, P: 2, M: 2, S: "zb_h1", SP: True, "tensor_overlap": 3, "recompute": "full"},
    ),
    "p2v2 zb_v offload": (2, {P: 2, V: 2, M: 4, S: "zb_v", "recompute": "offload"}),
    "t2p2sp offload": (
        4,
        {T: 2, P: 2, M: 2, SP: True, "recompute": "offload", "recompute_layers": 2},
    ),
    "t2p2 scattered": (4, {T: 2, P: 2, M: 2, "scatter_gather": True}),
    "t2p2 not scattered": (4, {T: 2, P: 2, M: 2, "scatter_gather": False}),
}

QUICK = ("d2", "p2v2", "t2sp")


@pytest.fixture(scope="module")
def reference(pool: Pool) -> Any:
    @cache
    def one_process(run: Run) -> dict[str, Any]:
        return pool.run(fit, world_size=1, args=(run,))[0]

    return lambda **kwargs: one_process(Frozen(**kwargs))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.quick) if name in QUICK else name for name in LAYOUTS],
)
def test_gpt_with_accumulation_clipping_ties_and_uneven_padding(
    name: str, pool: Pool, reference: Any
) -> None:
    world_size, layout = LAYOUTS[name]
    settings = {"layers": 7, "accumulate": 2}
    expected = reference(**settings)
    assert min(expected["norms"]) > 0.05, "the clipping threshold must bite"
    ranks = pool.run(
        fit, world_size=world_size, args=(Run(world_size=world_size, layout=layout, **settings),)
    )
    for found in ranks:
        assert_same(found, expected)
    assert len({tuple(found["losses"]) for found in ranks}) == 1, "ranks disagree about the loss"


@pytest.mark.parametrize("name", ["d2", "t2sp", "p2v2", "t2p2v2sp"])
def test_llama_without_accumulation(name: str, pool: Pool, reference: Any) -> None:
    world_size, layout = LAYOUTS[name]
    settings = {"llama": True, "steps": 10, "clip": None}
    found = pool.run(
        fit, world_size=world_size, args=(Run(world_size=world_size, layout=layout, **settings),)
    )[0]
    assert_same(found, reference(**settings))


@pytest.mark.parametrize("name", ["p2v2 m3", "t2p2", "d2p2"])
def test_eagerly_built_model_and_a_plain_loss(name: str, pool: Pool, reference: Any) -> None:
    world_size, layout = LAYOUTS[name]
    settings = {
        "eager": True,
        "count_tokens": False,
        "ignore_padding": False,
        "steps": 10,
        "accumulate": 2,
    }
    found = pool.run(
        fit, world_size=world_size, args=(Run(world_size=world_size, layout=layout, **settings),)
    )[0]
    assert_same(found, reference(**settings))


def test_last_batch_that_does_not_divide(pool: Pool, reference: Any) -> None:
    settings = {"samples": 29, "steps": 12}
    layout = {P: 2, V: 2, M: 4}
    found = pool.run(fit, world_size=2, args=(Run(world_size=2, layout=layout, **settings),))[0]
    assert_same(found, reference(**settings))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_and_options_of_the_pipeline(name: str, pool: Pool, reference: Any) -> None:
    world_size, layout = SCHEDULES[name]
    expected = reference(**PIPELINE)
    assert min(expected["norms"]) > 0.05, "the clipping threshold must bite"
    ranks = pool.run(
        fit, world_size=world_size, args=(Run(world_size=world_size, layout=layout, **PIPELINE),)
    )
    for found in ranks:
        assert_same(found, expected)
    if layout.get("partition") == NAMES:
        assert ranks[0]["ranges"] == ((0, 1), (1, 3), (3, 6), (6, 7))


PIPELINE: dict[str, Any] = {"layers": 7, "accumulate": 2, "steps": 6, "global_batch": 16}
"""With 16 samples a hidden state is large enough to be scattered."""


@pytest.mark.parametrize("name", ["d2p2 zb_h1", "d2p2v2 zb_v", "d2p2v2 dualpipe_v"])
def test_reductions_while_the_schedule_runs(name: str, pool: Pool, reference: Any) -> None:
    """Several buckets a stage, and no accumulation, which would put the reductions behind the
    schedule."""
    settings = {"layers": 7, "steps": 6, "count_tokens": True}
    world_size, layout = SCHEDULES[name]
    run = Run(world_size=world_size, layout={**layout, "bucket_mb": 1e-2}, **settings)
    for found in pool.run(fit, world_size=world_size, args=(run,)):
        assert_same(found, reference(**settings))


def test_a_schedule_from_a_file(pool: Pool, reference: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "mine.csv")
    dump_schedule(
        build_schedule(
            "zb_v", pipeline_parallel_size=2, virtual_pipeline_size=2, num_microbatches=4
        ),
        path,
    )
    run = Run(world_size=2, layout={P: 2, V: 2, M: 4, S: path}, **PIPELINE)
    assert_same(pool.run(fit, world_size=2, args=(run,))[0], reference(**PIPELINE))


@pytest.mark.parametrize("name", ["p2v2 zb_v", "p2v2 dualpipe_v"])
def test_llama_with_lengths_that_change_and_a_last_batch_that_does_not_divide(
    name: str, pool: Pool, reference: Any
) -> None:
    settings = {"llama": True, "samples": 29, "steps": 9, "changing_lengths": True}
    world_size, layout = SCHEDULES[name]
    found = pool.run(
        fit, world_size=world_size, args=(Run(world_size=world_size, layout=layout, **settings),)
    )[0]
    assert_same(found, reference(**settings))


@pytest.mark.parametrize("name", ["p2 zb_h1", "p2v2 zb_v"])
def test_evaluation_between_training_steps_changes_nothing(
    name: str, pool: Pool, reference: Any
) -> None:
    settings = {"accumulate": 2, "steps": 8}
    world_size, layout = SCHEDULES[name]
    run = Run(world_size=world_size, layout=layout, validate_every=1, **settings)
    found = pool.run(fit, world_size=world_size, args=(run,))[0]
    assert_same(found, reference(**settings))
    evaluated = reference(**settings, validate_every=1)
    assert found["logged"]["val_loss"] == pytest.approx(evaluated["logged"]["val_loss"], rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", ["p2 zb_h1", "p2v2 zb_v"])
def test_bfloat16(name: str, precision: str, pool: Pool, reference: Any) -> None:
    settings = {"precision": precision, "steps": 8}
    world_size, layout = SCHEDULES[name]
    found = pool.run(
        fit, world_size=world_size, args=(Run(world_size=world_size, layout=layout, **settings),)
    )[0]
    expected = reference(**settings)
    # One process reports a loss of its dtype, to 1/128 of it.
    assert found["losses"] == pytest.approx(
        expected["losses"], rel=2e-2 if precision == "bf16-true" else 2e-3
    )
    assert found["norms"] == pytest.approx(expected["norms"], rel=5e-2)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_changes_no_bit_with_dropout(recompute: str, pool: Pool) -> None:
    world_size, layout = SCHEDULES["p2v2 zb_v"]
    settings = {"steps": 4, "dropout": 0.2, "world_size": world_size}
    kept = pool.run(fit, world_size=world_size, args=(Run(layout=layout, **settings),))[0]
    found = pool.run(
        fit,
        world_size=world_size,
        args=(Run(layout={**layout, "recompute": recompute}, **settings),),
    )[0]
    assert found["losses"] == kept["losses"]
    for name, value in kept["final"].items():
        assert torch.equal(found["final"][name], value), name
